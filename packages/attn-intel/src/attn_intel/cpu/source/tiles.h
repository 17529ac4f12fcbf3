/* Products of matrices by AMX: tiles of 16 rows of 64 bytes, from numbers packed as elsewhere. */
#pragma once
#include "vectors.h"

enum { STEP = 32, SIDE = 16 }; /* values come in whole tiles of 16 words; a tile's rows */

INLINE void begin_products(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = SIDE;
    _tile_loadconfig(&shape);
}

INLINE void end_products(void) { _tile_release(); }

/* Where a tile of sums lies: in c, or apart where it has rows or columns that c has not. */
typedef struct {
    float *at;
    int64_t row; /* bytes */
} Sums;

static Sums sums_of(float *c, int64_t c_row, int rows, int add, float *apart) {
    if (rows == SIDE) return (Sums){c, 4 * c_row};
    if (add)
        for (int i = 0; i < rows; i++) store(apart + i * SIDE, load(c + i * c_row));
    return (Sums){apart, 4 * SIDE};
}

static void put_back(Sums sums, float *c, int64_t c_row, int rows) {
    if (sums.at != c)
        for (int i = 0; i < rows; i++) store(c + i * c_row, load(sums.at + i * SIDE));
}

/*
 * Tiles 0 to 3 are sums: two of rows by two of columns; 4 and 5 hold rows, 6 and 7 columns. Two
 * of each need each load for two products.
 */
static void tiles(int rows, int two_columns, const float *a, int64_t a_row, const float *b,
                  int steps, float *c, int64_t c_row, int add) {
    float apart[4][SIDE * SIDE] __attribute__((aligned(64)));
    int first = rows < SIDE ? rows : SIDE, second = rows - first;
    float *below = c + SIDE * c_row;
    Sums s0 = sums_of(c, c_row, first, add, apart[0]);
    Sums s1 = {0}, s2 = {0}, s3 = {0};
    if (add) _tile_loadd(0, s0.at, s0.row);
    else _tile_zero(0);
    if (two_columns) {
        s1 = sums_of(c + SIDE, c_row, first, add, apart[1]);
        if (add) _tile_loadd(1, s1.at, s1.row);
        else _tile_zero(1);
    }
    if (second) {
        s2 = sums_of(below, c_row, second, add, apart[2]);
        if (add) _tile_loadd(2, s2.at, s2.row);
        else _tile_zero(2);
        if (two_columns) {
            s3 = sums_of(below + SIDE, c_row, second, add, apart[3]);
            if (add) _tile_loadd(3, s3.at, s3.row);
            else _tile_zero(3);
        }
    }
    for (int step = 0; step < steps; step += SIDE) {
        _tile_loadd(4, a + step, 4 * a_row);
        _tile_loadd(6, b + (int64_t)step * PANEL, 4 * PANEL);
        _tile_dpbf16ps(0, 4, 6);
        if (two_columns) {
            _tile_loadd(7, b + (int64_t)step * PANEL + SIDE, 4 * PANEL);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (second) {
            _tile_loadd(5, a + SIDE * a_row + step, 4 * a_row);
            _tile_dpbf16ps(2, 5, 6);
            if (two_columns) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, s0.at, s0.row);
    put_back(s0, c, c_row, first);
    if (two_columns) {
        _tile_stored(1, s1.at, s1.row);
        put_back(s1, c + SIDE, c_row, first);
    }
    if (second) {
        _tile_stored(2, s2.at, s2.row);
        put_back(s2, below, c_row, second);
    }
    if (second && two_columns) {
        _tile_stored(3, s3.at, s3.row);
        put_back(s3, below + SIDE, c_row, second);
    }
}

/*
 * c [rows, columns] = a · b, or += where `add`. a has `steps` words a row, a multiple of 16, and
 * memory for whole tiles of rows; b is packed; columns are whole vectors.
 */
static void product(int rows, int columns, int steps, const number *a, int64_t a_row,
                    const number *b, float *c, int64_t c_row, int add) {
    const float *left = (const float *)a, *right = (const float *)b; /* 32-bit words */
    for (int column = 0; column < columns; column += 2 * SIDE) {
        const float *from = right + (int64_t)(column / PANEL) * steps * PANEL + column % PANEL;
        for (int row = 0; row < rows; row += 2 * SIDE) {
            int some = rows - row < 2 * SIDE ? rows - row : 2 * SIDE;
            tiles(some, columns - column > SIDE, left + row * a_row, a_row, from, steps,
                  c + row * c_row + column, c_row, add);
        }
    }
}
