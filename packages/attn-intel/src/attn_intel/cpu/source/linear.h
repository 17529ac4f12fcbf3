/* Products of few rows with a linear layer's weights, which are read once, where they lie. */
#pragma once
#include "vectors.h"

/* Finish `count` outputs of a row from `first`. */
static void put_outputs(const Linear *a, int64_t row, int64_t first, int count, const float *sums) {
    uint16_t *out = a->out + row * a->outputs + first;
    if (a->bias)
        for (int i = 0; i < count; i++) out[i] = to_bf16(sums[i] + one(BF16, a->bias, first + i));
    else
        for (int i = 0; i < count; i++) out[i] = to_bf16(sums[i]);
}

/* `count` outputs of `rows` rows, all sums in registers. ask: for the weights that follow. */
INLINE void few_of(const int rows, const int count, const Linear *a, int64_t row, int64_t first,
                   int ask) {
    const uint16_t *x = a->x + row * a->inputs, *weight = a->weight + first * a->inputs;
    vec sums[4][4];
    for (int i = 0; i < count; i++)
        for (int r = 0; r < rows; r++) sums[i][r] = all(0);
    for (int64_t k = 0; k < a->inputs; k += 2 * W) {
        vec right[4];
        for (int r = 0; r < rows; r++) right[r] = load(x + r * a->inputs + k);
        for (int i = 0; i < count; i++) {
            const uint16_t *left = weight + i * a->inputs + k;
            if (ask) __builtin_prefetch((const char *)left + 8192);
            vec numbers = load(left);
            for (int r = 0; r < rows; r++)
                sums[i][r] = multiply_add(sums[i][r], numbers, right[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        float found[4];
        for (int i = 0; i < count; i++) found[i] = sum(sums[i][r]);
        put_outputs(a, row + r, first, count, found);
    }
}

static void few_rows(const Linear *a, int64_t first, int64_t end) {
    for (; first < end; first += 4)
        for (int64_t row = 0; row < a->rows; row += 4) {
            int rows = a->rows - row < 4 ? (int)(a->rows - row) : 4;
            int count = end - first < 4 ? (int)(end - first) : 4;
#define FEW_OF(R, COUNT) \
    case R * 8 + COUNT: few_of(R, COUNT, a, row, first, !row); break;
#define FEW_OF_ROWS(R) FEW_OF(R, 1) FEW_OF(R, 2) FEW_OF(R, 3) FEW_OF(R, 4)
            switch (rows * 8 + count) {
                FEW_OF_ROWS(1) FEW_OF_ROWS(2) FEW_OF_ROWS(3) FEW_OF_ROWS(4)
            }
        }
}

#if LEVEL_NUMBER == 2
void linear_avx512_bf16(const Linear *a, int64_t first, int64_t end) { few_rows(a, first, end); }
#else
#include "tiles.h"

/* Turn 16 rows of x at a time into columns, as turn_queries does; rows that are absent are 0. */
void turn_rows(const Linear *a, uint16_t *turned) {
    for (int64_t row = 0; row < a->rows; row += SIDE) {
        int rows = a->rows - row < SIDE ? (int)(a->rows - row) : SIDE;
        turn_queries(a->x + row * a->inputs, rows, (int)(a->inputs / KS), turned);
        turned += SIDE * a->inputs;
    }
}

/* The weights are the left-hand side, so that they need no other order. */
void linear_amx_bf16(const Linear *a, const uint16_t *turned, int64_t first, int64_t end) {
    float tile[2][SIDE * W] __attribute__((aligned(64)));
    begin_products();
    for (; first + 2 * SIDE <= end; first += 2 * SIDE) {
        const uint16_t *weight = a->weight + first * a->inputs;
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
                    put_outputs(a, row + r, first + t * SIDE, SIDE, (const float *)&x[r]);
            }
        }
    }
    end_products();
    few_rows(a, first, end);
}
#endif
