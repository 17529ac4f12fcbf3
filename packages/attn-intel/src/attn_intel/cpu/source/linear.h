/* Products of few rows with a linear layer's weights, which are read once, where they lie. */
#pragma once
#include "vectors.h"

/* Pairs of neighbouring numbers that products take: 2 · W of them. */
#if PAIRS
typedef vec pairs;
INLINE pairs read_pairs(const int type, const char *p) { (void)type; return load(p); }
INLINE vec add_products(vec sum, pairs a, pairs b) { return multiply_add(sum, a, b); }
#else
typedef struct { vec even, odd; } pairs; /* of float32 any two halves, in the same order in both */
INLINE pairs read_pairs(const int type, const char *p) {
    if (type == F32) return (pairs){load(p), load(p + 4 * W)};
    uvec words = (uvec)load(p);
    return (pairs){(vec)(words << 16), (vec)(words & 0xffff0000u)};
}
INLINE vec add_products(vec sum, pairs a, pairs b) {
    return multiply_add(multiply_add(sum, a.even, b.even), a.odd, b.odd);
}
#endif

enum { BESIDE = W == 8 ? 2 : 4 }; /* rows that share what is read of the weights */

/* Finish `count` outputs of a row from `first`. */
INLINE void put_outputs(const int type, const Linear *a, int64_t row, int64_t first, int count,
                        const float *sums) {
    int64_t at = row * a->outputs + first;
    if (a->bias)
        for (int i = 0; i < count; i++)
            put(type, a->out, at + i, sums[i] + one(type, a->bias, first + i));
    else
        for (int i = 0; i < count; i++) put(type, a->out, at + i, sums[i]);
}

/* `count` outputs of `rows` rows, all sums in registers. ask: for the weights that follow. */
INLINE void few_of(const int type, const int rows, const int count, const Linear *a, int64_t row,
                   int64_t first, int ask) {
    const int bytes = type == F32 ? 4 : 2;
    int64_t length = a->inputs * bytes;
    const char *x = (const char *)a->x + row * length;
    const char *weight = (const char *)a->weight + first * length;
    vec sums[4][BESIDE];
    for (int i = 0; i < count; i++)
        for (int r = 0; r < rows; r++) sums[i][r] = all(0);
    for (int64_t k = 0; k < length; k += 2 * W * bytes) {
        pairs right[BESIDE];
        for (int r = 0; r < rows; r++) right[r] = read_pairs(type, x + r * length + k);
        for (int i = 0; i < count; i++) {
            const char *left = weight + i * length + k;
            if (ask) __builtin_prefetch(left + 8192);
            pairs numbers = read_pairs(type, left);
            for (int r = 0; r < rows; r++) sums[i][r] = add_products(sums[i][r], numbers, right[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        float found[4];
        for (int i = 0; i < count; i++) found[i] = sum(sums[i][r]);
        put_outputs(type, a, row + r, first, count, found);
    }
}

#if W == 8
/* Outputs [first, end) of one row, which read the weights in the order of memory. */
INLINE void one_row(const int type, const Linear *a, int64_t row, int64_t first, int64_t end) {
    const int step = 2 * W * (type == F32 ? 4 : 2), line = 64;
    int64_t length = a->inputs * step / (2 * W);
    const char *x = (const char *)a->x + row * length;
    for (; first < end; first++) {
        const char *weight = (const char *)a->weight + first * length;
        vec sums[4] = {all(0), all(0), all(0), all(0)};
        for (int64_t k = 0; k < length; k += 2 * step) {
            for (int i = 0; i < 2 * step; i += line) __builtin_prefetch(weight + k + i + 1024);
            for (int i = 0; i < 2; i++) {
                pairs left = read_pairs(type, weight + k + i * step);
                pairs right = read_pairs(type, x + k + i * step);
                sums[2 * i] = multiply_add(sums[2 * i], left.even, right.even);
                sums[2 * i + 1] = multiply_add(sums[2 * i + 1], left.odd, right.odd);
            }
        }
        float output = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        put_outputs(type, a, row, first, 1, &output);
    }
}
#endif

/* Outputs [first, end) of the rows [row, last). */
INLINE void few_rows(const int type, const Linear *a, int64_t row, int64_t last, int64_t first,
                     int64_t end) {
#if W == 8
    /* four rows of weights at a time, as below, are read faster only where they are long */
    if (last - row == 1 && a->inputs * (type == F32 ? 4 : 2) <= 4096) {
        one_row(type, a, row, first, end);
        return;
    }
#endif
    for (; first < end; first += 4)
        for (int64_t r = row; r < last; r += BESIDE) {
            int rows = last - r < BESIDE ? (int)(last - r) : BESIDE;
            int count = end - first < 4 ? (int)(end - first) : 4;
#define FEW_OF(R, COUNT) \
    case R * 8 + COUNT: few_of(type, R, COUNT, a, r, first, r == row); break;
#define FEW_OF_ROWS(R) FEW_OF(R, 1) FEW_OF(R, 2) FEW_OF(R, 3) FEW_OF(R, 4)
            switch (rows * 8 + count) {
                FEW_OF_ROWS(1) FEW_OF_ROWS(2)
#if W == 16
                FEW_OF_ROWS(3) FEW_OF_ROWS(4)
#endif
            }
        }
}

#if LEVEL_NUMBER < 3
/* Rows that stay in the second cache go over all weights before the next. */
void NAME(linear_)(const Linear *a, int64_t first, int64_t end) {
    int64_t together = 65536 / a->inputs > 32 ? 65536 / a->inputs : 32;
    for (int64_t row = 0; row < a->rows; row += together) {
        int64_t last = row + together < a->rows ? row + together : a->rows;
#if !PAIRS
        if (a->type == F32) {
            few_rows(F32, a, row, last, first, end);
            continue;
        }
#endif
        few_rows(BF16, a, row, last, first, end);
    }
}
#else
#include "tiles.h"

/* Turn 16 rows of x at a time into columns, as turn_queries does; rows that are absent are 0. */
void turn_rows(const Linear *a, uint16_t *turned) {
    for (int64_t row = 0; row < a->rows; row += SIDE) {
        int rows = a->rows - row < SIDE ? (int)(a->rows - row) : SIDE;
        turn_queries((const number *)a->x + row * a->inputs, rows, (int)(a->inputs / KS), turned);
        turned += SIDE * a->inputs;
    }
}

/* The weights are the left-hand side, so that they need no other order. */
void linear_amx_bf16(const Linear *a, const uint16_t *turned, int64_t first, int64_t end) {
    float tile[2][SIDE * W] __attribute__((aligned(64)));
    begin_products();
    for (; first + 2 * SIDE <= end; first += 2 * SIDE) {
        const number *weight = (const number *)a->weight + first * a->inputs;
        const number *right = turned;
        /* the weights that follow, in the order of memory that this block reads its own in */
        const char *next = first + 4 * SIDE <= end ? (const char *)(weight + 2 * SIDE * a->inputs) : 0;
        for (int64_t row = 0; row < a->rows; row += SIDE, right += SIDE * a->inputs) {
            int rows = a->rows - row < SIDE ? (int)(a->rows - row) : SIDE;
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t k = 0; k < a->inputs; k += 2 * W) {
                LOAD_TILE(6, right + k * SIDE, 4 * SIDE);
                LOAD_TILE(4, weight + k, 2 * a->inputs);
                _tile_dpbf16ps(0, 4, 6);
                LOAD_TILE(5, weight + SIDE * a->inputs + k, 2 * a->inputs);
                _tile_dpbf16ps(1, 5, 6);
                if (next && !row)
                    for (int i = 0; i < 2 * SIDE; i++)
                        __builtin_prefetch(next + 2 * (i * a->inputs + k), 0, 2);
            }
            _tile_stored(0, tile[0], 4 * W);
            _tile_stored(1, tile[1], 4 * W);
            IN_MEMORY();
            for (int t = 0; t < 2; t++) {
                vec x[W];
                for (int i = 0; i < W; i++) x[i] = load(tile[t] + i * W);
                transpose(x);
                for (int r = 0; r < rows; r++)
                    put_outputs(BF16, a, row + r, first + t * SIDE, SIDE, (const float *)&x[r]);
            }
        }
    }
    end_products();
    few_rows(BF16, a, 0, a->rows, first, end);
}
#endif
