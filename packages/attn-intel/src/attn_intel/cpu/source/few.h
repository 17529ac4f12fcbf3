/* Products of few rows, as of a decode step: keys and values are read where they lie. */
#pragma once
#include "pack.h"

enum { FEW = 6 }; /* rows for which packed numbers would be read once only */

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

/* Scores of W keys, of which the first n exist. */
INLINE void few_scores_of(const int rows, int n, int words, const float *q, int64_t q_row,
                          const char **keys, float *scores, int64_t scores_row,
                          const Ahead *ahead, int first) {
    vec sums[FEW][W];
    for (int i = 0; i < n; i++) {
        vec now[FEW];
        ask_for(ahead, first + i);
        for (int r = 0; r < rows; r++) now[r] = all(0);
        for (int word = 0; word < words; word += W) {
            vec key = load(keys[i] + 4 * word);
            for (int r = 0; r < rows; r++)
                now[r] = multiply_add(now[r], load(q + r * q_row + word), key);
        }
        for (int r = 0; r < rows; r++) sums[r][i] = now[r];
    }
    for (int r = 0; r < rows; r++) {
        for (int i = n; i < W; i++) sums[r][i] = all(0);
        store(scores + r * scores_row, sums_of_each(sums[r]));
    }
}

/* Outputs of `vectors` columns: c [rows, vectors · W] += p · values of n keys. */
INLINE void few_outputs_of(const int rows, const int vectors, int n, const float *p, int64_t p_row,
                           const char **values, int64_t column, float *c, int64_t c_row,
                           const Ahead *ahead) {
    vec sums[FEW][NV];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sums[r][j] = load(c + r * c_row + j * W);
    for (int key = 0; key < n; key += KS) {
        vec right[NV];
        if (!column)
            for (int i = key; i < key + KS; i++) ask_for(ahead, i);
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
#else
        for (int j = 0; j < vectors; j++) right[j] = load(values[key] + 4 * (column + j * W));
#endif
        for (int r = 0; r < rows; r++) {
            vec left = all(p[r * p_row + key / KS]);
            for (int j = 0; j < vectors; j++) sums[r][j] = multiply_add(sums[r][j], left, right[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) store(c + r * c_row + j * W, sums[r][j]);
}

#define FOR_ROWS(CALL) \
    switch (rows) { \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        case 3: CALL(3); break; \
        case 4: CALL(4); break; \
        case 5: CALL(5); break; \
        case 6: CALL(6); break; \
    }

static void few_scores(int rows, int n, int words, const number *q, const char **keys,
                       float *scores, int64_t scores_row, const Ahead *ahead) {
    for (int key = 0; key < n; key += W) {
        int some = n - key < W ? n - key : W;
#define SCORES(R) \
    few_scores_of(R, some, words, (const float *)q, words, keys + key, scores + key, scores_row, \
                  ahead, key)
        FOR_ROWS(SCORES)
    }
}

/* columns: a multiple of 2 · W where products are of pairs. */
static void few_outputs(int rows, int columns, int n, const number *p, int64_t p_row,
                        const char **values, float *c, int64_t c_row, const Ahead *ahead) {
    int column = 0;
    for (; column + PANEL <= columns; column += PANEL) {
#define OUTPUTS(R) \
    few_outputs_of(R, NV, n, (const float *)p, p_row, values, column, c + column, c_row, ahead)
        FOR_ROWS(OUTPUTS)
    }
    for (; column < columns; column += W * KS) {
#define LAST_OUTPUTS(R) \
    few_outputs_of(R, KS, n, (const float *)p, p_row, values, column, c + column, c_row, ahead)
        FOR_ROWS(LAST_OUTPUTS)
    }
}
