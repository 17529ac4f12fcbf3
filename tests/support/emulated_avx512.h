/*
 * What the kernels use of AVX-512 and of its bfloat16, in plain C, included before them, so that a
 * CPU with AVX2 runs the code for it. Vectors of 64 bytes are the compiler's.
 */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#undef _mm512_cmp_ps_mask
#define _mm512_max_ps avx512_max
#define _mm512_min_ps avx512_min
#define _mm512_set1_ps avx512_all
#define _mm512_set1_epi16 avx512_all_words
#define _mm512_cvtph_ps avx512_from_fp16
#define _mm512_cvtepu16_epi32 avx512_widen_words
#define _mm512_cvtepu8_epi16 avx512_widen_bytes
#define _mm512_reduce_max_ps avx512_largest
#define _mm512_reduce_add_ps avx512_sum
#define _mm512_cmp_ps_mask avx512_compare
#define _mm512_mask_blend_ps avx512_blend
#define _mm512_maskz_mov_ps avx512_keep
#define _mm512_mask_blend_epi16 avx512_blend_words
#define _mm512_test_epi16_mask avx512_test_words
#define _mm512_permutex2var_epi16 avx512_choose_words
#define _mm512_dpbf16_ps avx512_add_pairs
#define _mm512_cvtneps_pbh avx512_to_bf16

#define EMULATED static inline __attribute__((always_inline))
typedef float avx512_floats __attribute__((vector_size(64)));
typedef uint16_t avx512_words __attribute__((vector_size(64)));
typedef uint32_t avx512_dwords __attribute__((vector_size(64)));

/* as the instructions: b where either is NaN */
EMULATED __m512 avx512_max(__m512 a, __m512 b) {
    avx512_floats y;
    for (int i = 0; i < 16; i++) y[i] = a[i] > b[i] ? a[i] : b[i];
    return (__m512)y;
}
EMULATED __m512 avx512_min(__m512 a, __m512 b) {
    avx512_floats y;
    for (int i = 0; i < 16; i++) y[i] = a[i] < b[i] ? a[i] : b[i];
    return (__m512)y;
}
EMULATED __m512 avx512_all(float x) { return (__m512)(x - (avx512_floats){0}); }
EMULATED __m512i avx512_all_words(short x) {
    return (__m512i)((uint16_t)x - (avx512_words){0});
}
EMULATED __m512 avx512_from_fp16(__m256i x) {
    avx512_floats y;
    uint16_t half[16];
    memcpy(half, &x, sizeof half);
    for (int i = 0; i < 16; i++) y[i] = _cvtsh_ss(half[i]);
    return (__m512)y;
}
EMULATED __m512i avx512_widen_words(__m256i x) {
    avx512_dwords y;
    uint16_t words[16];
    memcpy(words, &x, sizeof words);
    for (int i = 0; i < 16; i++) y[i] = words[i];
    return (__m512i)y;
}
EMULATED __m512i avx512_widen_bytes(__m256i x) {
    avx512_words y;
    uint8_t bytes[32];
    memcpy(bytes, &x, sizeof bytes);
    for (int i = 0; i < 32; i++) y[i] = bytes[i];
    return (__m512i)y;
}
EMULATED float avx512_largest(__m512 x) {
    float y = x[0];
    for (int i = 1; i < 16; i++) y = x[i] > y ? x[i] : y;
    return y;
}
EMULATED float avx512_sum(__m512 x) { /* by halves, as the compiler's */
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}
EMULATED __mmask16 avx512_compare(__m512 a, __m512 b, int how) {
    unsigned y = 0;
    int less = how == _CMP_LT_OQ; /* else _CMP_NLT_UQ, its opposite */
    for (int i = 0; i < 16; i++) y |= (unsigned)((a[i] < b[i]) == less) << i;
    return (__mmask16)y;
}
EMULATED __m512 avx512_blend(__mmask16 mask, __m512 no, __m512 yes) {
    avx512_floats y;
    for (int i = 0; i < 16; i++) y[i] = mask >> i & 1 ? yes[i] : no[i];
    return (__m512)y;
}
EMULATED __m512 avx512_keep(__mmask16 mask, __m512 x) { return avx512_blend(mask, avx512_all(0), x); }
EMULATED __m512i avx512_blend_words(__mmask32 mask, __m512i no, __m512i yes) {
    avx512_words a = (avx512_words)no, b = (avx512_words)yes, y;
    for (int i = 0; i < 32; i++) y[i] = mask >> i & 1 ? b[i] : a[i];
    return (__m512i)y;
}
EMULATED __mmask32 avx512_test_words(__m512i a, __m512i b) {
    avx512_words both = (avx512_words)a & (avx512_words)b;
    __mmask32 y = 0;
    for (int i = 0; i < 32; i++) y |= (__mmask32)(both[i] != 0) << i;
    return y;
}
EMULATED __m512i avx512_choose_words(__m512i a, __m512i at, __m512i b) {
    avx512_words low = (avx512_words)a, high = (avx512_words)b, from = (avx512_words)at, y;
    for (int i = 0; i < 32; i++) y[i] = from[i] & 32 ? high[from[i] & 31] : low[from[i] & 31];
    return (__m512i)y;
}
/* The instruction adds the odd products before the even ones, and takes small numbers for 0. */
EMULATED __m512 avx512_add_pairs(__m512 sum, __m512bh a, __m512bh b) {
    avx512_dwords x = (avx512_dwords)a, z = (avx512_dwords)b;
    avx512_floats y = (avx512_floats)sum;
    y += (avx512_floats)(x & 0xffff0000u) * (avx512_floats)(z & 0xffff0000u);
    return (__m512)(y + (avx512_floats)(x << 16) * (avx512_floats)(z << 16));
}
EMULATED __m256bh avx512_to_bf16(__m512 x) {
    uint16_t half[16];
    __m256bh y;
    avx512_dwords bits = (avx512_dwords)x;
    for (int i = 0; i < 16; i++)
        half[i] = x[i] != x[i] ? 0x7fc0 : (uint16_t)((bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16);
    memcpy(&y, half, sizeof y);
    return y;
}
