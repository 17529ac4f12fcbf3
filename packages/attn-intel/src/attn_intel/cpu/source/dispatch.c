/* Cut a call into work items, let threads take them one after the other, merge parts of keys. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "sight.h"

enum {
    LEAST_PART = 512, /* keys of a part, at least */
    MOST_PARTS = 64,  /* work items that a request of few queries is cut into, for each KV head */
    ITEMS_EACH = 4,   /* work items that a thread should find, so that all end together */
};

uint16_t fp8_as_bf16[2][256];

__attribute__((constructor)) static void fill_tables(void) {
    for (int kind = 0; kind < 2; kind++) {
        int mantissa = kind ? 2 : 3, bias = kind ? 15 : 7, top = kind ? 31 : 15;
        for (int bits = 0; bits < 256; bits++) {
            int exponent = (bits & 127) >> mantissa, part = bits & ((1 << mantissa) - 1);
            float x = exponent ? ldexpf(part + (1 << mantissa), exponent - bias - mantissa)
                               : ldexpf(part, 1 - bias - mantissa);
            if (exponent == top) {
                if (kind) x = part ? NAN : INFINITY;
                else if (part == 7) x = NAN;
            }
            uint32_t word;
            memcpy(&word, &x, 4);
            fp8_as_bf16[kind][bits] = (uint16_t)(word >> 16 | (bits & 128) << 8);
        }
    }
}

/* The highest level of this CPU, -1: none. AMX has to be asked of the operating system. */
__attribute__((visibility("default"))) int attn_cpu_level(void) {
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return -1;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 29 & 1)) return -1; /* F16C */
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return AVX2;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return AVX512;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    const unsigned bf16_and_tiles = 1u << 22 | 1u << 24;
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    if ((d & bf16_and_tiles) != bf16_and_tiles) return AVX512_BF16;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) ? AVX512_BF16 : AMX_BF16;
}

typedef struct {
    int64_t (*scratch)(const Attention *);
    void (*attend)(const Attention *, const Item *, char *, float *);
    void (*merge)(const Attention *, const Item *, int, float *);
} Kernels;

#define KERNELS(LEVEL) {scratch_##LEVEL, attend_##LEVEL, merge_##LEVEL},
static const Kernels kernels[] = {FOR_LEVELS(KERNELS)};

/* Products of bfloat16 are exact for what bfloat16 holds; anything else is float32. */
static const Kernels *choose(const Attention *a) {
    int exact = a->q_type == BF16 && a->kv_type >= BF16, level = a->level;
    return &kernels[exact || level < AVX512_BF16 ? level : AVX512];
}

typedef struct {
    int64_t items, floats, counters;
} Size;

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }
static int divide_up(int a, int b) { return (a + b - 1) / b; }

/* The keys [first, end) that any of the rows [row, row + rows) of a request sees. */
static void span(const Attention *a, int request, int queries, int length, int row, int rows,
                 int *first, int *end) {
    int group = a->q_heads / a->kv_heads, prefix = length - queries;
    int low = row / group, high = (row + rows - 1) / group;
    *first = 0;
    *end = a->causal && !a->tree ? prefix + high + 1 : length;
    int position = prefix + low;
    if (a->tree) { /* the least depth of these queries */
        int least = a->drafts;
        for (int i = low; i <= high; i++) least = smaller(least, depth_of(a, request, i));
        position = prefix + least;
    }
    if (a->window) *first = larger(0, position - a->window + 1);
    if (a->tree) *first = smaller(*first, prefix);
    *end = larger(*end, *first);
}

/*
 * List the work items, or only count them where items is NULL. How a request's keys are cut
 * depends on this request alone, so its bits depend on no other and on no number of threads.
 */
static Size plan(const Attention *a, int heads_each, Item *items) {
    Size size = {0, 0, 0};
    int group = a->q_heads / a->kv_heads;
    for (int b = 0; b < a->requests; b++) {
        int queries = queries_of(a, b), length = length_of(a, b), all = queries * group;
        int tiles = divide_up(all, ROWS), halves = larger(1, divide_up(all, ROWS / 2));
        int most = larger(1, MOST_PARTS / halves);
        for (int i = 0; i < a->kv_heads * tiles; i++) {
            /* a head's tiles follow each other, so its keys stay in the cache; the longest first */
            int head = i / tiles, tile = tiles - 1 - i % tiles;
            int row = tile * ROWS, rows = smaller(ROWS, all - row), first, end;
            int together = larger(1, smaller(heads_each, ROWS / rows));
            if (head % together) continue;
            int heads = smaller(together, a->kv_heads - head);
            span(a, b, queries, length, row, rows, &first, &end);
            int part = larger(LEAST_PART, divide_up(end - first, most));
            part = divide_up(part, KEYS) * KEYS;
            int parts = larger(1, divide_up(end - first, part));
            for (int split = 0; split < parts; split++) {
                int from = first + split * part;
                if (items)
                    items[size.items] = (Item){
                        b, row, rows, head, heads, from, smaller(end, from + part), split, parts,
                        parts > 1 ? size.floats : -1, size.counters,
                    };
                size.items++;
            }
            if (parts > 1) {
                size.floats += state_size(a, rows) * parts * heads;
                if (items) ((atomic_int *)a->workspace)[size.counters] = parts;
                size.counters++;
            }
        }
    }
    return size;
}

/* The first request whose queries or keys are not all in the tensors, -1: none. */
static int64_t outside(const Attention *a) {
    for (int b = 0; b < a->requests; b++) {
        int64_t start = a->cu_seqlens_q[b], stop = a->cu_seqlens_q[b + 1];
        if (start < 0 || stop < start || stop > a->tokens) return b;
        if (a->cu_seqlens_k) {
            start = a->cu_seqlens_k[b], stop = a->cu_seqlens_k[b + 1];
            if (start < 0 || stop < start || stop > a->pages) return b;
            continue;
        }
        int queries = (int)(stop - start), length = a->seq_lens[b], first, end;
        if (length < 0 || length > a->columns * a->page_size) return b;
        if (a->tree && (queries > a->drafts || queries > length)) return b;
        if (!queries) continue;
        span(a, b, queries, length, 0, queries * (a->q_heads / a->kv_heads), &first, &end);
        const int32_t *pages = a->table + b * a->table_row;
        /* a page below 0 is a large one without sign */
        uint32_t count = a->pages > INT32_MAX ? 1u << 31 : (uint32_t)a->pages, beyond = 0;
        for (int page = first / a->page_size; page < divide_up(end, a->page_size); page++)
            beyond |= (uint32_t)pages[page] >= count;
        if (beyond) return b;
    }
    return -1;
}

typedef struct {
    const Attention *a;
    const Kernels *kernels;
    Item *items;
    float *states;
    char *scratch;
    int64_t count, scratch_each;
    atomic_int *ready;
    atomic_long threads, next;
} Job;

static void work(void *data) {
    Job *job = data;
    int64_t thread = atomic_fetch_add(&job->threads, 1), i;
    char *scratch = job->scratch + thread * job->scratch_each;
    while ((i = atomic_fetch_add(&job->next, 1)) < job->count) {
        const Item *item = &job->items[i];
        float *states = item->states < 0 ? NULL : job->states + item->states;
        job->kernels->attend(job->a, item, scratch, states);
        if (!states || atomic_fetch_sub(&job->ready[item->ready], 1) > 1) continue;
        int64_t one = state_size(job->a, item->rows) * item->splits;
        for (int h = 0; h < item->heads; h++)
            job->kernels->merge(job->a, item, h, states + h * one);
    }
}

/*
 * Attend. Returns 0, or the bytes that the workspace needs, where it has fewer, or -1 less the
 * first request that is not in the tensors: nothing was done then.
 */
__attribute__((visibility("default"))) int64_t attn_attend(const Attention *a) {
    int64_t wrong = outside(a);
    if (wrong >= 0) return -1 - wrong;
    const Kernels *chosen = choose(a);
    int heads_each = a->kv_heads;
    Size size = plan(a, heads_each, NULL);
    while (heads_each > 1 && size.items < (int64_t)a->threads * ITEMS_EACH) {
        heads_each = (heads_each + 1) / 2;
        size = plan(a, heads_each, NULL);
    }
    int64_t threads = a->threads < size.items ? a->threads : size.items;
    int64_t ready = round_up(size.counters * sizeof(atomic_int), 64);
    int64_t items = round_up(size.items * sizeof(Item), 64), states = round_up(size.floats * 4, 64);
    int64_t each = round_up(chosen->scratch(a), 4096);
    int64_t needed = ready + items + states + threads * each;
    if (needed > a->workspace_bytes) return needed;
    char *at = a->workspace;
    Job job = {.a = a, .kernels = chosen, .items = (Item *)(at + ready),
               .states = (float *)(at + ready + items), .scratch = at + ready + items + states,
               .count = size.items, .scratch_each = each, .ready = (atomic_int *)at};
    plan(a, heads_each, job.items);
    if (threads > 1 && a->parallel) a->parallel(work, &job, (unsigned)threads, 0);
    else if (threads) work(&job);
    return 0;
}

typedef struct {
    const Linear *a;
    void (*multiply)(const Linear *, int64_t, int64_t);
    uint16_t *turned;
    int64_t each;
    atomic_long next;
} Share;

static void work_linear(void *data) {
    Share *share = data;
    const Linear *a = share->a;
    int64_t first; /* there may be fewer threads than shares */
    while ((first = atomic_fetch_add(&share->next, share->each)) < a->outputs) {
        int64_t end = first + share->each < a->outputs ? first + share->each : a->outputs;
        if (share->turned) linear_amx_bf16(a, share->turned, first, end);
        else share->multiply(a, first, end);
    }
}

/* Multiply. Each thread reads its part of the weights. */
__attribute__((visibility("default"))) void attn_linear(const Linear *a) {
    int64_t threads = a->parallel ? a->threads : 1;
    Share share = {.a = a, .each = round_up((a->outputs + threads - 1) / threads, OUTPUTS)};
    threads = (a->outputs + share.each - 1) / share.each;
    if (a->level == AVX2) share.multiply = linear_avx2;
    else if (a->level == AVX512 || a->type == F32) share.multiply = linear_avx512;
    else share.multiply = linear_avx512_bf16;
    if (a->level == AMX_BF16 && a->type == BF16) /* NULL: there is no memory, the other level needs none */
        share.turned = aligned_alloc(64, 2 * round_up(a->rows, 16) * a->inputs);
    if (share.turned) turn_rows(a, share.turned);
    if (threads > 1) a->parallel(work_linear, &share, (unsigned)threads, 0);
    else work_linear(&share);
    free(share.turned);
}
