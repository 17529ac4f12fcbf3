/* Products of few rows, as of a decode step: keys and values are read where they lie. */
#pragma once
#include "pack.h"

/*
 * FEW: up to so many rows, packing would cost more than it saves. With vectors of 8 numbers the
 * products take longer, so that the limit is higher. AT_ONCE: rows that are multiplied together; six
 * by two vectors take 15 of AVX2's 16 registers.
 */
enum { FEW = W == 8 ? 16 : 6, AT_ONCE = 6 };
enum { LEAST = W == 8 ? 2 : KS }; /* vectors of values that are multiplied together */
enum { NUMBERS = PAIRS ? BF16 : F32 }; /* the type that products take as it is */

/* A vector from the word-th of a row of NUMBERS or, where those are float32, of BF16. */
INLINE vec load_words(const int type, const char *row, int64_t word) {
    return type == NUMBERS ? load(row + 4 * word) : from_bf16(row + 2 * word);
}

/*
 * Two vectors of a row of values. Of bfloat16 those of even columns come first, then those of odd
 * ones: both become float32 where they lie, by a shift and by a mask.
 */
INLINE void load_two(const int type, const char *row, int64_t column, vec *x) {
    if (type == NUMBERS) {
        x[0] = load(row + 4 * column);
        x[1] = load(row + 4 * (column + W));
    } else {
        uvec pairs = (uvec)load(row + 2 * column);
        x[0] = (vec)(pairs << 16);
        x[1] = (vec)(pairs & 0xffff0000u);
    }
}

#if W == 8
/* Put n sums of such values into the order of their columns. */
static void put_in_order(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 2 * W) {
        vec even = load(x + i), odd = load(x + i + W);
        store(x + i, SHUFFLE(ivec, even, odd, 0, 8, 1, 9, 2, 10, 3, 11));
        store(x + i + W, SHUFFLE(ivec, even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
    }
}
#endif

/* Add up each of W vectors: number i of the result is the sum of vector i. */
INLINE vec sums_of_each(vec *x) {
#define HALVE(h) \
    for (int i = 0; i < h; i++) { \
        vec a = x[i], b = x[i + h]; \
        x[i] = SHUFFLE(ivec, a, b, FIRST_##h) + SHUFFLE(ivec, a, b, SECOND_##h); \
    }
#if W == 16
    HALVE(8)
#endif
    HALVE(4)
    HALVE(2)
    HALVE(1)
    return x[0];
}

/* Into how many blocks rows fall; keys that are multiplied with a block at a time. */
INLINE int blocks_of(int rows) { return (rows - 1) / AT_ONCE + 1; }
INLINE int keys_each(int rows) { return W == 16 ? 1 : rows <= 2 ? 4 : 2; }

/* Scores of W keys, of which the first n exist. Enough sums at a time hide how long each takes. */
INLINE void few_scores_of(const int type, const int rows, int n, int words, const float *q,
                          const char **keys, float *scores, Ahead *ahead, int lines) {
    enum { EACH = W == 8 ? 4 : 1 };
    const int each = keys_each(rows);
    vec sums[AT_ONCE][W + EACH];
    for (int i = 0; i < n; i += each) {
        vec now[EACH][AT_ONCE];
        const char *key[EACH];
        ask_for_lines(ahead, lines);
        for (int e = 0; e < each; e++) {
            key[e] = keys[i + e < n ? i + e : i];
            for (int r = 0; r < rows; r++) now[e][r] = all(0);
        }
#if W == 8 /* fewer additions between products */
#pragma GCC unroll 2
#endif
        for (int word = 0; word < words; word += W) {
            vec right[EACH];
            for (int e = 0; e < each; e++) right[e] = load_words(type, key[e], word);
            for (int r = 0; r < rows; r++) {
                vec left = load(q + r * words + word);
                for (int e = 0; e < each; e++) now[e][r] = multiply_add(now[e][r], left, right[e]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int e = 0; e < each; e++) sums[r][i + e] = now[e][r];
    }
    for (int r = 0; r < rows; r++) {
        for (int i = n; i < W; i++) sums[r][i] = all(0);
        store(scores + r * KEYS, sums_of_each(sums[r]));
    }
}

/* Outputs of `vectors` columns: c [rows, vectors · W] += p · values of n keys. */
INLINE void few_outputs_of(const int type, const int rows, const int vectors, int n,
                           const float *p, const char **values, int64_t column, float *c,
                           int64_t c_row, Ahead *ahead, int lines) {
    vec sums[AT_ONCE][4];
    if (W == 8) ask_for_lines(ahead, lines);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sums[r][j] = load(c + r * c_row + j * W);
#if W == 8
#pragma GCC unroll 2
#endif
    for (int key = 0; key < n; key += KS) {
        vec right[4];
        if (W == 16) ask_for_lines(ahead, lines);
#if PAIRS
        const char *first = values[key] + 2 * column;
        /* an absent last key counts 0 times, so the one before stands for it */
        const char *second = values[key + 1 < n ? key + 1 : key] + 2 * column;
        for (int j = 0; j < vectors; j += 2) {
            full a, b;
            memcpy(&a, first + 2 * j * W, sizeof a);
            memcpy(&b, second + 2 * j * W, sizeof b);
            right[j] = (vec)SHUFFLE(full, a, b, INTERLEAVED(0));
            right[j + 1] = (vec)SHUFFLE(full, a, b, INTERLEAVED(16));
        }
#elif W == 8
        for (int j = 0; j < vectors; j += 2) load_two(type, values[key], column + j * W, right + j);
#else
        for (int j = 0; j < vectors; j++) right[j] = load_words(type, values[key], column + j * W);
#endif
        for (int r = 0; r < rows; r++) {
            vec left = all(p[r * (KEYS / KS) + key / KS]);
            for (int j = 0; j < vectors; j++) sums[r][j] = multiply_add(sums[r][j], left, right[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) store(c + r * c_row + j * W, sums[r][j]);
}

#define CASES_OF_ROWS(CALL) CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6)

INLINE void few_scores_in(const int type, int rows, int n, int words, const number *q,
                          const char **keys, float *scores, Ahead *ahead, int parts) {
    int lines = lines_each(ahead, parts * blocks_of(rows) * ((n - 1) / keys_each(rows) + 1));
    for (int row = 0; row < rows; row += AT_ONCE)
        for (int key = 0; key < n; key += W) {
            const float *left = (const float *)q + (int64_t)row * words;
            float *to = scores + row * KEYS + key;
            int some = n - key < W ? n - key : W;
#define SCORES(R) \
    case R: few_scores_of(type, R, some, words, left, keys + key, to, ahead, lines); break;
            switch (rows - row < AT_ONCE ? rows - row : AT_ONCE) { CASES_OF_ROWS(SCORES) }
        }
}

/* columns: a multiple of 2 · W where products are of pairs. */
INLINE void few_outputs_in(const int type, int rows, int columns, int n, const number *p,
                           const char **values, float *c, int64_t c_row, Ahead *ahead) {
    int least = rows <= 2 ? 4 : NV; /* vectors that are enough sums at a time */
    int times = blocks_of(rows) * ((columns - 1) / (least * W) + 1) * (W == 8 ? 1 : (n - 1) / KS + 1);
    int lines = lines_each(ahead, times);
    for (int column = 0, vectors; column < columns; column += vectors * W) {
        vectors = column + least * W <= columns ? least : LEAST;
        for (int row = 0; row < rows; row += AT_ONCE) {
            const float *left = (const float *)(p + row * KEYS);
            float *to = c + row * c_row + column;
#define OUTPUTS_OF(R, V) \
    case R * 8 + V: \
        few_outputs_of(type, R, V, n, left, values, column, to, c_row, ahead, lines); \
        break;
#define OUTPUTS(R) OUTPUTS_OF(R, LEAST) OUTPUTS_OF(R, 4)
            switch ((rows - row < AT_ONCE ? rows - row : AT_ONCE) * 8 + vectors) {
                CASES_OF_ROWS(OUTPUTS)
            }
        }
    }
}

/*
 * type: of keys, and of values, as `load_words` takes it. Of the lines ahead one of `parts` is
 * asked for meanwhile, by `few_outputs` all that are left.
 */
static void few_scores(int type, int rows, int n, int words, const number *q, const char **keys,
                       float *scores, Ahead *ahead, int parts) {
    const int same = PAIRS || type == NUMBERS;
    if (same) few_scores_in(NUMBERS, rows, n, words, q, keys, scores, ahead, parts);
    else few_scores_in(BF16, rows, n, words, q, keys, scores, ahead, parts);
}

static void few_outputs(int type, int rows, int columns, int n, const number *p,
                        const char **values, float *c, int64_t c_row, Ahead *ahead) {
    if (PAIRS || type == NUMBERS) few_outputs_in(NUMBERS, rows, columns, n, p, values, c, c_row, ahead);
    else few_outputs_in(BF16, rows, columns, n, p, values, c, c_row, ahead);
}
