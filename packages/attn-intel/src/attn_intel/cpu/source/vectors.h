/* Vectors of float32 of one level, and the functions of them that a softmax needs. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "attention.h"

#if LEVEL_NUMBER == 0
#define W 8 /* numbers in a vector */
#define NV 2 /* vectors in a panel of packed numbers */
#else
#define W 16
#define NV 4
#endif
#define PAIRS (LEVEL_NUMBER >= 2) /* products of pairs of bfloat16, else of single float32 */
enum { MR = 6, PANEL = NV * W, KS = PAIRS ? 2 : 1 };
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t half_vec __attribute__((vector_size(2 * W)));
#if PAIRS
typedef uint16_t number; /* what products are formed of */
#else
typedef float number;
#endif

/* Numbers of two vectors, counted through both, at constant places. */
#ifdef __clang__
#define SHUFFLE(indices, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(indices, a, b, ...) __builtin_shuffle(a, b, (indices){__VA_ARGS__})
#endif

INLINE vec load(const void *p) { vec x; memcpy(&x, p, sizeof x); return x; }
INLINE void store(void *p, vec x) { memcpy(p, &x, sizeof x); }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE ivec all_int(int32_t x) { return x - (ivec){0}; }

#if W == 16
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vec from_fp16(const void *p) {
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vec from_bf16(const void *p) {
    return (vec)((uvec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
}
INLINE float largest(vec x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE float sum(vec x) { return _mm512_reduce_add_ps((__m512)x); }
/* yes where a < b, else no */
INLINE vec where_less(vec a, vec b, vec yes, vec no) {
    __mmask16 less = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
    return (vec)_mm512_mask_blend_ps(less, (__m512)no, (__m512)yes);
}
/* 0 where a < least, else y */
INLINE vec unless_less(vec a, float least, vec y) {
    __mmask16 others = _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(least), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_mov_ps(others, (__m512)y);
}
/* x in the columns [low, high), -inf elsewhere */
INLINE vec only(vec x, int low, int high) {
    low = low < 0 ? 0 : low > 16 ? 16 : low;
    high = high < low ? low : high > 16 ? 16 : high;
    __mmask16 seen = (__mmask16)((1u << high) - (1u << low));
    return (vec)_mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), (__m512)x);
}
#else
INLINE vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vec from_fp16(const void *p) {
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE vec from_bf16(const void *p) {
    return (vec)((uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
}
INLINE float largest(vec x) {
    x = larger(x, SHUFFLE(ivec, x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = larger(x, SHUFFLE(ivec, x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return x[0] > x[1] ? x[0] : x[1];
}
INLINE float sum(vec x) {
    x += SHUFFLE(ivec, x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += SHUFFLE(ivec, x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    return x[0] + x[1];
}
INLINE vec where_less(vec a, vec b, vec yes, vec no) {
    return (vec)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)(a < b));
}
INLINE vec unless_less(vec a, float least, vec y) {
    return (vec)_mm256_andnot_ps((__m256)(a < least), (__m256)y);
}
INLINE vec only(vec x, int low, int high) {
    ivec column = {0, 1, 2, 3, 4, 5, 6, 7};
    ivec seen = (column >= low) & (column < high);
    return (vec)_mm256_blendv_ps(_mm256_set1_ps(-INFINITY), (__m256)x, (__m256)seen);
}
#endif

INLINE vec multiply_add(vec sum, vec a, vec b) {
#if PAIRS
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + a * b;
#endif
}

/*
 * 2 to the power of x <= 0; 0 below the normal numbers. The polynomial errs by 3e-9 at most. Its
 * value is multiplied by the power, not added to in its exponent: so any NaN stays one.
 */
INLINE vec power_of_two(vec x) {
    const float magic = 0x1.8p23f + 127; /* sums have a whole number, 127 more, as last bits */
    vec shifted = x + magic, f = x - (shifted - magic);
    vec y = f * 0.00015469732f + 0.00134004322f;
    y = y * f + 0.00961802560f;
    y = y * f + 0.0555032721f;
    y = y * f + 0.240226512f;
    y = y * f + 0.693147207f;
    y = y * f + 1.0f;
    /* 127 is the exponent of 1; wraps where x is too small */
    vec power = (vec)((uvec)shifted << 23);
    return unless_less(x, -126.0f, y * power);
}

/* A polynomial near 0, else by 2^x; errs by a few units in the last place. */
INLINE vec hyperbolic_tangent(vec x) {
    vec size = larger(x, -x), z = x * x;
    vec y = z * -0.00585642786f + 0.0207574754f;
    y = y * z - 0.0537699218f;
    y = y * z + 0.133317047f;
    y = y * z - 0.33333284f;
    vec near = x + x * z * y;
    vec p = power_of_two(size * -2.88539008f); /* -2 log2(e) */
    vec far = (1.0f - p) / (1.0f + p);
    far = where_less(x, all(0.0f), -far, far);
    return where_less(size, all(0.6f), near, far);
}

INLINE float one(int type, const void *p, int64_t i) {
    uint32_t bits;
    float x;
    if (type == F32) return ((const float *)p)[i];
    if (type == F16) return _cvtsh_ss(((const uint16_t *)p)[i]);
    if (type == BF16) bits = ((const uint16_t *)p)[i];
    else bits = fp8_as_bf16[type - E4M3][((const uint8_t *)p)[i]];
    bits <<= 16;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void put(int type, void *p, int64_t i, float x) {
    if (type == F32) ((float *)p)[i] = x;
    else if (type == F16) ((uint16_t *)p)[i] = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
    else ((uint16_t *)p)[i] = to_bf16(x);
}
