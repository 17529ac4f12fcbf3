/* Rows of scores become what the values weigh. */
#pragma once
#include "vectors.h"

#define LOG2_E 1.44269504f

/* Scale a row of scores, cap it, and hide what is not in the columns [low, high). */
static void limit(float *scores, int columns, int low, int high, float scale, float cap) {
    for (int c = 0; c < columns; c += W) {
        vec x = load(scores + c) * scale;
        if (cap != 0) x = hyperbolic_tangent(x) * cap;
        if (low > c || high < c + W) x = only(x, low - c, high - c);
        store(scores + c, x);
    }
}

/*
 * Write 2 to the power of a row of scores, less `peak` and then `scale` times, less `base`; return
 * their sums. without_peak: peak is 0, which costs no difference.
 */
INLINE vec powers(const float *scores, int columns, float scale, float peak, float base,
                  const int without_peak, number *p) {
    vec total = all(0);
    for (int c = 0; c < columns; c += W) {
        vec x = load(scores + c);
        x = power_of_two((without_peak ? x : x - peak) * scale - base);
        total += x;
#if PAIRS
        __m256bh half = _mm512_cvtneps_pbh((__m512)x);
        memcpy(p + c, &half, sizeof half);
#else
        store(p + c, x);
#endif
    }
    return total;
}

/*
 * Turn a row of scores, `scale` > 0 times, into probabilities, relative to the largest so far.
 * Returns the factor of what was summed before.
 */
static float soften(const float *scores, int columns, float scale, float *largest_so_far,
                    float *sum_so_far, number *p) {
    vec most = all(-INFINITY), total;
    for (int c = 0; c < columns; c += W) most = larger(most, load(scores + c));
    float before = *largest_so_far, peak = largest(most), here = peak * scale, now = here;
    if (before > now) now = before;
    float base = now == -INFINITY ? 0 : now * LOG2_E, factor = 1, last = before * LOG2_E - base;
    if (fabsf(here) > 0x1p8f && fabsf(here) < INFINITY) {
        /* products with large scores lose more than exponents bear: their differences come first */
        total = powers(scores, columns, scale * LOG2_E, peak, (now - here) * LOG2_E, 0, p);
        last = (before - now) * LOG2_E;
    } else {
        total = powers(scores, columns, scale * LOG2_E, 0, base, 1, p);
    }
    if (before != now) factor = power_of_two(all(last))[0];
    *largest_so_far = now;
    *sum_so_far = *sum_so_far * factor + sum(total);
    return factor;
}
