/* Products of matrices by AMX: tiles of 16 rows of 64 bytes, from numbers packed as elsewhere. */
#pragma once
#include "pack.h"

/* values come in whole tiles of 16 words; a tile's rows; rows of q that `scores_of_keys` takes */
enum { STEP = 32, SIDE = 16, TURNED = SIDE };

/* What was stored has to be in memory: GCC's intrinsics do not say that they read it. */
#define IN_MEMORY() __asm__ volatile("" ::: "memory")
#define LOAD_TILE(tile, from, row) \
    do { \
        IN_MEMORY(); \
        _tile_loadd(tile, from, row); \
    } while (0)

INLINE void begin_products(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = SIDE;
    IN_MEMORY();
    _tile_loadconfig(&shape);
}

INLINE void end_products(void) { _tile_release(); }

/* Where a tile lies, and how many bytes its rows are apart. */
typedef struct {
    float *at;
    int64_t row;
} Tile;

/* A tile of sums lies in c, or apart where it has rows that c has not. */

static Tile sums_of(float *c, int64_t c_row, int rows, int add, float *apart) {
    if (rows == SIDE) return (Tile){c, 4 * c_row};
    if (add)
        for (int i = 0; i < rows; i++) store(apart + i * SIDE, load(c + i * c_row));
    return (Tile){apart, 4 * SIDE};
}

static void put_back(Tile sums, float *c, int64_t c_row, int rows) {
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
    Tile s0 = sums_of(c, c_row, first, add, apart[0]);
    Tile s1 = {0}, s2 = {0}, s3 = {0};
    if (add) LOAD_TILE(0, s0.at, s0.row);
    else _tile_zero(0);
    if (two_columns) {
        s1 = sums_of(c + SIDE, c_row, first, add, apart[1]);
        if (add) LOAD_TILE(1, s1.at, s1.row);
        else _tile_zero(1);
    }
    if (second) {
        s2 = sums_of(below, c_row, second, add, apart[2]);
        if (add) LOAD_TILE(2, s2.at, s2.row);
        else _tile_zero(2);
        if (two_columns) {
            s3 = sums_of(below + SIDE, c_row, second, add, apart[3]);
            if (add) LOAD_TILE(3, s3.at, s3.row);
            else _tile_zero(3);
        }
    }
    for (int step = 0; step < steps; step += SIDE) {
        LOAD_TILE(4, a + step, 4 * a_row);
        LOAD_TILE(6, b + (int64_t)step * PANEL, 4 * PANEL);
        _tile_dpbf16ps(0, 4, 6);
        if (two_columns) {
            LOAD_TILE(7, b + (int64_t)step * PANEL + SIDE, 4 * PANEL);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (second) {
            LOAD_TILE(5, a + SIDE * a_row + step, 4 * a_row);
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

/* Turn `rows` rows of q, at most 16, of whole vectors of words, into packed columns. */
static void turn_queries(const number *q, int rows, int words, number *to) {
    for (int word = 0; word < words; word += W) {
        vec x[W];
        for (int r = 0; r < W; r++) x[r] = r < rows ? load(q + (r * words + word) * KS) : all(0);
        transpose(x);
        for (int i = 0; i < W; i++) store(to + (word + i) * W * KS, x[i]);
    }
}

/* Where 16 keys from `first` lie at one distance from each other; else they are copied to `to`. */
static Tile whole_tile(const char **keys, int first, int n, int words, number *to) {
    int64_t distance = first + 1 < n ? keys[first + 1] - keys[first] : 0;
    int even = first + SIDE <= n;
    for (int i = 1; even && i < SIDE; i++) even = keys[first + i] - keys[first] == i * distance;
    if (even) return (Tile){(float *)keys[first], distance};
    for (int i = 0; i < SIDE; i++) {
        number *row = to + (int64_t)(first + i) * words * KS;
        if (first + i < n) memcpy(row, keys[first + i], 4 * words);
        else memset(row, 0, 4 * words);
    }
    return (Tile){(float *)(to + (int64_t)first * words * KS), 4 * words};
}

/*
 * Scores of n keys with rows of q that are turned. The keys are the left-hand side and read where
 * they lie, so only the scores are transposed: less work than packing keys for up to 16 rows.
 */
static void scores_of_keys(int rows, int n, int words, const number *turned, const char **keys,
                           number *copies, float *scores, const Ahead *ahead) {
    float tile[4][SIDE * W] __attribute__((aligned(64)));
    const float *right = (const float *)turned;
    int count = (n + SIDE - 1) / SIDE, turn = 0, turns = count * words / W;
    Tile left[4];
    for (int t = 0; t < count; t++) left[t] = whole_tile(keys, t * SIDE, n, words, copies);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int word = 0; word < words; word += W) {
        LOAD_TILE(7, right + word * W, 4 * W);
#define KEYS_OF(t, rows_of) \
    if (t < count) { \
        LOAD_TILE(rows_of, left[t].at + word, left[t].row); \
        _tile_dpbf16ps(t, rows_of, 7); \
        for (int i = turn * ahead->n / turns; i < (turn + 1) * ahead->n / turns; i++) \
            ask_for(ahead, i); \
        turn++; \
    }
        KEYS_OF(0, 4)
        KEYS_OF(1, 5)
        KEYS_OF(2, 6)
        KEYS_OF(3, 4)
    }
    _tile_stored(0, tile[0], 4 * W);
    _tile_stored(1, tile[1], 4 * W);
    _tile_stored(2, tile[2], 4 * W);
    _tile_stored(3, tile[3], 4 * W);
    for (int t = 0; t < count; t++) {
        vec x[W];
        for (int i = 0; i < W; i++) x[i] = load(tile[t] + i * W);
        transpose(x);
        for (int r = 0; r < rows; r++) store(scores + r * KEYS + t * W, x[r]);
    }
}

/* c += a · b of up to 16 rows and 32 words: both tiles of a stay, four tiles of c are summed. */
static void row_of_tiles(int rows, int columns, int steps, const float *a, int64_t a_row,
                         const float *b, float *c, int64_t c_row) {
    float apart[4][SIDE * SIDE] __attribute__((aligned(64)));
    LOAD_TILE(4, a, 4 * a_row);
    if (steps > SIDE) LOAD_TILE(5, a + SIDE, 4 * a_row);
    for (int column = 0; column < columns; column += PANEL, b += (int64_t)steps * PANEL) {
        int count = columns - column < PANEL ? (columns - column) / SIDE : PANEL / SIDE;
        Tile sums[4];
#define COLUMNS_OF(t, b0, b1) \
    if (t < count) { \
        sums[t] = sums_of(c + column + t * SIDE, c_row, rows, 1, apart[t]); \
        LOAD_TILE(t, sums[t].at, sums[t].row); \
        LOAD_TILE(b0, b + t * SIDE, 4 * PANEL); \
        _tile_dpbf16ps(t, 4, b0); \
        if (steps > SIDE) { \
            LOAD_TILE(b1, b + SIDE * PANEL + t * SIDE, 4 * PANEL); \
            _tile_dpbf16ps(t, 5, b1); \
        } \
    }
        COLUMNS_OF(0, 6, 7)
        COLUMNS_OF(1, 6, 7)
        COLUMNS_OF(2, 6, 7)
        COLUMNS_OF(3, 6, 7)
#define STORED(t) \
    if (t < count) { \
        _tile_stored(t, sums[t].at, sums[t].row); \
        put_back(sums[t], c + column + t * SIDE, c_row, rows); \
    }
        STORED(0)
        STORED(1)
        STORED(2)
        STORED(3)
    }
}

/*
 * c [rows, columns] = a · b, or += where `add`. a has `steps` words a row, a multiple of 16, and
 * memory for whole tiles of rows; b is packed; columns are whole vectors.
 */
static void product(int rows, int columns, int steps, const number *a, int64_t a_row,
                    const number *b, float *c, int64_t c_row, int add) {
    const float *left = (const float *)a, *right = (const float *)b; /* 32-bit words */
    if (add && rows <= SIDE && steps <= 2 * SIDE) {
        row_of_tiles(rows, columns, steps, left, a_row, right, c, c_row);
        return;
    }
    for (int column = 0; column < columns; column += 2 * SIDE) {
        const float *from = right + (int64_t)(column / PANEL) * steps * PANEL + column % PANEL;
        for (int row = 0; row < rows; row += 2 * SIDE) {
            int some = rows - row < 2 * SIDE ? rows - row : 2 * SIDE;
            tiles(some, columns - column > SIDE, left + row * a_row, a_row, from, steps,
                  c + row * c_row + column, c_row, add);
        }
    }
}
