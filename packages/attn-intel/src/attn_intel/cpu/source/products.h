/* Products of matrices: rows of numbers with packed columns, summed in float32. */
#pragma once
#include "vectors.h"

enum { STEP = KS, CHUNK = 64 }; /* values come in multiples of STEP */

INLINE void begin_products(void) {}
INLINE void end_products(void) {}

/* MR rows or fewer with NV vectors of columns or fewer, all sums in registers. */
INLINE void block(const int rows, const int vectors, const float *a, int64_t a_row, const float *b,
                  int steps, float *c, int64_t c_row, int add) {
    vec sums[MR][NV];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = all(0);
    for (int step = 0; step < steps; step++) {
        vec right[NV];
        for (int j = 0; j < vectors; j++) right[j] = load(b + step * PANEL + j * W);
        for (int i = 0; i < rows; i++) {
            vec left = all(a[i * a_row + step]);
            for (int j = 0; j < vectors; j++)
                sums[i][j] = multiply_add(sums[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) {
            float *to = c + i * c_row + j * W;
            store(to, add ? load(to) + sums[i][j] : sums[i][j]);
        }
}

#define CASE(rows, vectors) \
    case rows * 8 + vectors: block(rows, vectors, a, a_row, b, steps, c, c_row, add); break;
#if NV == 4
#define CASES(rows) CASE(rows, 1) CASE(rows, 2) CASE(rows, 3) CASE(rows, 4)
#else
#define CASES(rows) CASE(rows, 1) CASE(rows, 2)
#endif

static void block_of(int rows, int vectors, const float *a, int64_t a_row, const float *b,
                     int steps, float *c, int64_t c_row, int add) {
    switch (rows * 8 + vectors) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
}

/*
 * c [rows, columns] = a · b, or += where `add`. a has `steps` words a row, b is packed, columns
 * are whole vectors. Sums of CHUNK steps are added up: what is read again stays in the first
 * cache, and fewer small numbers are added to a large sum.
 */
static void product(int rows, int columns, int steps, const number *a, int64_t a_row,
                    const number *b, float *c, int64_t c_row, int add) {
    const float *left = (const float *)a, *right = (const float *)b; /* 32-bit words */
    for (int column = 0; column < columns; column += PANEL, right += (int64_t)steps * PANEL) {
        int vectors = (columns - column < PANEL ? columns - column : PANEL) / W;
        for (int step = 0; step < steps; step += CHUNK) {
            int few = steps - step < CHUNK ? steps - step : CHUNK;
            for (int row = 0; row < rows; row += MR) {
                int some = rows - row < MR ? rows - row : MR;
                block_of(some, vectors, left + row * a_row + step, a_row, right + step * PANEL,
                         few, c + row * c_row + column, c_row, add || step);
            }
        }
    }
}
