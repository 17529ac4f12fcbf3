/* Outputs where values are not finite: 0 times an infinity is NaN, for queries that do not see it. */
#pragma once
#include "vectors.h"

/* Add what is not 0 where a number is not finite: an infinity less itself is NaN. n: of vectors. */
INLINE vec not_finite(vec so_far, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += W) so_far += load(x + i) - load(x + i);
    return so_far;
}

/* c [rows, columns] += p · values of n keys, of which a row leaves out those that it weighs 0. */
static void careful_outputs(int rows, int columns, int n, const number *p, const char **values,
                            float *c, int64_t c_row) {
    const int type = PAIRS ? BF16 : F32;
    for (int r = 0; r < rows; r++)
        for (int key = 0; key < n; key++) {
            float weight = one(type, p, r * KEYS + key);
            if (weight == 0) continue;
            for (int i = 0; i < columns; i++)
                c[r * c_row + i] += weight * one(type, values[key], i);
        }
}
