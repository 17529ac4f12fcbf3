/* Bring rows of numbers into the order that products read them in. */
#pragma once
#include "vectors.h"

/*
 * The right-hand side of a product is packed in panels of PANEL columns. A panel holds, for each
 * step, one 32-bit word per column: a float32, or two bfloat16 of neighbouring steps.
 */

/* Copy n numbers of some type from memory to `to`, which ends in zeros up to `padded`. */
INLINE void read_row(int type, const char *from, int n, int padded, number *to) {
    int i = 0;
#if PAIRS
    if (type == BF16) {
        memcpy(to, from, 2 * n);
        i = n;
    } else if (type == E4M3 || type == E5M2) {
        typedef uint16_t words __attribute__((vector_size(64)));
        __m512i table[4]; /* of the numbers without sign */
        memcpy(table, fp8_as_bf16[type - E4M3], sizeof table);
        for (; i + 32 <= n; i += 32) {
            words x = (words)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(from + i)));
            __m512i low = _mm512_permutex2var_epi16(table[0], (__m512i)x, table[1]);
            __m512i high = _mm512_permutex2var_epi16(table[2], (__m512i)x, table[3]);
            __mmask32 is_high = _mm512_test_epi16_mask((__m512i)x, _mm512_set1_epi16(64));
            words y = (words)_mm512_mask_blend_epi16(is_high, low, high);
            y |= (x & 128) << 8;
            memcpy(to + i, &y, sizeof y);
        }
    }
    for (; i < n; i++) to[i] = to_bf16(one(type, from, i));
#else
    if (type == F32) {
        memcpy(to, from, 4 * n);
        i = n;
    } else if (type == F16) {
        for (; i + W <= n; i += W) store(to + i, from_fp16(from + 2 * i));
    } else if (type == BF16) {
        for (; i + W <= n; i += W) store(to + i, from_bf16(from + 2 * i));
    }
    for (; i < n; i++) to[i] = one(type, from, i);
#endif
    for (; i < padded; i++) to[i] = 0;
}

/* Exchange blocks of h numbers between two rows: one stage of a transposition. */
#define STAGE(h) \
    for (int i = 0; i < W; i++) \
        if (!(i & h)) { \
            vec a = x[i], b = x[i + h]; \
            x[i] = SHUFFLE(ivec, a, b, FIRST_##h); \
            x[i + h] = SHUFFLE(ivec, a, b, SECOND_##h); \
        }
#if W == 16
#define FIRST_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define SECOND_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define FIRST_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define SECOND_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define FIRST_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define SECOND_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define FIRST_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define SECOND_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#else
#define FIRST_1 0, 8, 2, 10, 4, 12, 6, 14
#define SECOND_1 1, 9, 3, 11, 5, 13, 7, 15
#define FIRST_2 0, 1, 8, 9, 4, 5, 12, 13
#define SECOND_2 2, 3, 10, 11, 6, 7, 14, 15
#define FIRST_4 0, 1, 2, 3, 8, 9, 10, 11
#define SECOND_4 4, 5, 6, 7, 12, 13, 14, 15
#endif

INLINE void transpose(vec *x) {
    STAGE(1)
    STAGE(2)
    STAGE(4)
#if W == 16
    STAGE(8)
#endif
}

/*
 * Rows of the next keys or values, that are asked for between the products: row by row or, from
 * the byte of the row that comes next, line by line.
 */
typedef struct {
    const char *rows[KEYS];
    int n, bytes, row, byte;
} Ahead;

INLINE void ask_for(const Ahead *ahead, int i) {
    if (i < ahead->n)
        for (int byte = 0; byte < ahead->bytes; byte += 64)
            __builtin_prefetch(ahead->rows[i] + byte, 0, 2);
}

/* How many lines to ask for at a time, to have asked for all that are left after `times` times. */
INLINE int lines_each(const Ahead *ahead, int times) {
    int lines = (ahead->n - ahead->row) * ((ahead->bytes + 63) / 64);
    return (lines + times - 1) / times;
}

INLINE void ask_for_lines(Ahead *ahead, int lines) {
    for (; lines > 0 && ahead->row < ahead->n; lines--) {
        __builtin_prefetch(ahead->rows[ahead->row] + ahead->byte, 0, 2);
        ahead->byte += 64;
        if (ahead->byte >= ahead->bytes) ahead->byte = 0, ahead->row++;
    }
}

/* Pack n keys as columns, zeros up to a whole vector; rows have `words` words, whole vectors. */
static void pack_keys(const char **rows, int n, int words, number *to, const Ahead *ahead) {
    for (int first = 0; first < n; first += W) {
        char *columns = (char *)to + 4 * (first / PANEL * (int64_t)words * PANEL + first % PANEL);
        int some = n - first < W ? n - first : W;
        for (int i = 0; i < some; i++) ask_for(ahead, first + i);
        for (int word = 0; word < words; word += W) {
            vec x[W];
            for (int i = 0; i < W; i++) x[i] = i < some ? load(rows[first + i] + 4 * word) : all(0);
            transpose(x);
            for (int i = 0; i < W; i++) store(columns + 4 * PANEL * (int64_t)(word + i), x[i]);
        }
    }
}

#if PAIRS
typedef uint16_t full __attribute__((vector_size(64)));
#define BOTH(i) i, i + 32
#define FOUR(i) BOTH(i), BOTH(i + 1), BOTH(i + 2), BOTH(i + 3)
#define INTERLEAVED(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#endif

/* Pack n values as steps; zeros up to `steps`. The rows hold `columns` numbers, whole vectors. */
static void pack_values(const char **rows, int n, int steps, int columns, number *to,
                        const Ahead *ahead) {
    static const number zeros[4 * W] __attribute__((aligned(64)));
    for (int step = 0; step < steps; step++) {
        int key = step * KS;
        for (int i = key; i < key + KS; i++) ask_for(ahead, i);
        for (int c = 0; c < columns; c += W) {
            char *words = (char *)to + 4 * (c / PANEL * (int64_t)steps * PANEL + c % PANEL);
            words += 4 * PANEL * (int64_t)step;
#if PAIRS
            if (c + 2 * W <= columns && key + 1 < n) {
                full a, b;
                memcpy(&a, rows[key] + 2 * c, sizeof a);
                memcpy(&b, rows[key + 1] + 2 * c, sizeof b);
                store(words, (vec)SHUFFLE(full, a, b, INTERLEAVED(0)));
                store(words + 4 * W, (vec)SHUFFLE(full, a, b, INTERLEAVED(16)));
                c += W;
                continue;
            }
            const char *a = key < n ? rows[key] + 2 * c : (const char *)zeros;
            const char *b = key + 1 < n ? rows[key + 1] + 2 * c : (const char *)zeros;
            half_vec low, high;
            memcpy(&low, a, sizeof low);
            memcpy(&high, b, sizeof high);
            ivec pairs = __builtin_convertvector(low, ivec);
            pairs |= __builtin_convertvector(high, ivec) << 16;
            store(words, (vec)pairs);
#else
            store(words, key < n ? load(rows[key] + 4 * c) : load(zeros));
#endif
        }
    }
}
