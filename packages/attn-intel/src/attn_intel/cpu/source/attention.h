/* The C interface of intel_amx's kernels over raw pointers: one call for one layer of a pass. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum type { F32, F16, BF16, E4M3, E5M2 };            /* of elements in memory */
enum level { AVX2, AVX512, AVX512_BF16, AMX_BF16 };  /* what the kernels may use, rising */

enum { ROWS = 256, KEYS = 128 }; /* queries of a work item; keys that are packed at once */

/*
 * One call. Strides count elements; the last dimension of q, k, v and out is dense.
 *
 * q [T, Hq, D], out [T, Hq, Dv], lse float32 [T, Hq], dense, or NULL. Keys of a request lie in the
 * pages that its row of `table` lists, or, without a table, from its start in cu_seqlens_k, which
 * is NULL with one: a table without columns may be NULL too.
 * k and v [pages, page_size, Hkv, ...]; v NULL: the values are the first Dv numbers of the keys.
 * window 0: none. logit_cap 0: none. sinks float32 [Hq] or NULL.
 * tree: bytes [B, drafts, drafts], tree[b, i, j] = query i sees draft j, or NULL.
 * tokens: of q; pages: of k, without a table its tokens; columns: of table.
 * parallel: GOMP_parallel of the OpenMP that the process has loaded, or NULL: one thread.
 */
typedef struct {
    const void *q, *k, *v;
    void *out;
    float *lse;
    const float *sinks;
    const uint8_t *tree;
    const int32_t *table, *seq_lens, *cu_seqlens_q, *cu_seqlens_k;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    void *workspace;
    int64_t workspace_bytes;
    int64_t q_token, q_head, out_token, out_head, table_row;
    int64_t tokens, pages, columns;
    int64_t k_page, k_token, k_head, v_page, v_token, v_head;
    int32_t q_type, kv_type, out_type, level, threads;
    int32_t requests, q_heads, kv_heads, head_dim, v_head_dim, page_size, drafts, window, causal;
    float scale, v_scale, logit_cap;
} Attention;

/*
 * Queries of one request that share keys: `rows` of its (token, head of the group) pairs from
 * `row`, for `heads` KV heads from `head`, over its keys [first, end).
 * split: which part of the keys this is, of `splits`; states: where the unfinished outputs of the
 * first head's first part lie in the workspace, counted in floats; ready: the parts yet to come.
 */
typedef struct {
    int32_t request, row, rows, head, heads, first, end, split, splits;
    int64_t states, ready;
} Item;

/*
 * A linear layer of few rows: out [rows, outputs] = x [rows, inputs] · weight [outputs, inputs]
 * transposed + bias [outputs], all dense and of one type, BF16 or F32; bias NULL: none. inputs: a
 * multiple of 32.
 */
typedef struct {
    const void *x, *weight, *bias;
    void *out;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int64_t rows, inputs, outputs;
    int32_t type, level, threads;
} Linear;

enum { OUTPUTS = 32 }; /* that a thread takes at a time */

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Columns of an unfinished output: v_head_dim in whole vectors. */
static inline int64_t out_columns(const Attention *a) { return round_up(a->v_head_dim, 16); }

/* Floats of one part's state: outputs [rows, columns], the largest scores [rows], sums [rows]. */
static inline int64_t state_size(const Attention *a, int rows) {
    return rows * (out_columns(a) + 2);
}

extern uint16_t fp8_as_bf16[2][256]; /* of e4m3 and of e5m2, by their bits */

#define FOR_LEVELS(DO) DO(avx2) DO(avx512) DO(avx512_bf16) DO(amx_bf16)
#define DECLARE(LEVEL) \
    int64_t scratch_##LEVEL(const Attention *a); \
    void attend_##LEVEL(const Attention *a, const Item *item, char *scratch, float *states); \
    void merge_##LEVEL(const Attention *a, const Item *item, int head, float *states);
FOR_LEVELS(DECLARE)

/*
 * Outputs [first, end) of all rows. Types: BF16, below AVX512_BF16 also F32. turned: x as AMX
 * multiplies by it, round_up(rows, 16) · inputs numbers that `turn_rows` has written before.
 */
void linear_avx2(const Linear *a, int64_t first, int64_t end);
void linear_avx512(const Linear *a, int64_t first, int64_t end);
void linear_avx512_bf16(const Linear *a, int64_t first, int64_t end);
void linear_amx_bf16(const Linear *a, const uint16_t *turned, int64_t first, int64_t end);
void turn_rows(const Linear *a, uint16_t *turned);
