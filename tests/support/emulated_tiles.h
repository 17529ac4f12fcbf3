/*
 * AMX's tiles in plain C, included before the kernels, so that a CPU without AMX runs their code:
 * the same shapes, the same order of the operands, a fault where the hardware has one.
 */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_configure
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_multiply

static __thread struct {
    uint8_t configured, rows[8];
    uint16_t bytes[8];
    uint32_t words[8][16][16];
} emulated;

static inline void emulated_configure(const void *from) {
    const uint8_t *shape = from;
    if (shape[0] != 1 || shape[1]) abort(); /* palette, start row */
    memset(&emulated, 0, sizeof emulated);
    memcpy(emulated.bytes, shape + 16, sizeof emulated.bytes);
    memcpy(emulated.rows, shape + 48, sizeof emulated.rows);
    for (int i = 0; i < 8; i++)
        if (emulated.bytes[i] > 64 || emulated.bytes[i] % 4 || emulated.rows[i] > 16) abort();
    emulated.configured = 1;
}

static inline void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }

static inline void emulated_zero(int tile) {
    if (!emulated.configured) abort();
    memset(emulated.words[tile], 0, sizeof emulated.words[tile]);
}

static inline void emulated_load(int tile, const void *from, int64_t stride) {
    emulated_zero(tile);
    for (int i = 0; i < emulated.rows[tile]; i++)
        memcpy(emulated.words[tile][i], (const char *)from + i * stride, emulated.bytes[tile]);
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
    if (!emulated.configured) abort();
    for (int i = 0; i < emulated.rows[tile]; i++)
        memcpy((char *)to + i * stride, emulated.words[tile][i], emulated.bytes[tile]);
}

static inline float emulated_half(uint32_t word, int high) {
    uint32_t bits = high ? word & 0xffff0000u : word << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void emulated_multiply(int c, int a, int b) {
    int steps = emulated.bytes[a] / 4;
    if (!emulated.configured || emulated.rows[a] != emulated.rows[c] ||
        emulated.bytes[b] != emulated.bytes[c] || emulated.rows[b] != steps)
        abort();
    for (int m = 0; m < emulated.rows[c]; m++)
        for (int k = 0; k < steps; k++)
            for (int n = 0; n < emulated.bytes[c] / 4; n++) {
                uint32_t x = emulated.words[a][m][k], y = emulated.words[b][k][n];
                float sum;
                memcpy(&sum, &emulated.words[c][m][n], 4);
                sum += emulated_half(x, 0) * emulated_half(y, 0);
                sum += emulated_half(x, 1) * emulated_half(y, 1);
                memcpy(&emulated.words[c][m][n], &sum, 4);
            }
}
