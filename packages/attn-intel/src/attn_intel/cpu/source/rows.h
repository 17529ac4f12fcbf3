/* Where the keys and values of a request lie, and their rows as numbers of a product. */
#pragma once
#include "pack.h"

static const int BYTES[] = {4, 2, 2, 1, 1};

/* Where the keys and values of some tokens lie, for the first KV head. */
typedef struct {
    int64_t k[KEYS], v[KEYS];
} Places;

/* Find those of n tokens, from `first`. */
static void locate(const Attention *a, int request, int first, int n, Places *at) {
    if (a->cu_seqlens_k) {
        for (int i = 0; i < n; i++) {
            int64_t token = (int64_t)a->cu_seqlens_k[request] + first + i;
            at->k[i] = token * a->k_token;
            at->v[i] = token * a->v_token;
        }
        return;
    }
    const int32_t *pages = a->table + request * a->table_row;
    int page = first / a->page_size, offset = first % a->page_size;
    for (int i = 0; i < n; i++) {
        at->k[i] = pages[page] * a->k_page + offset * a->k_token;
        at->v[i] = pages[page] * a->v_page + offset * a->v_token;
        if (++offset == a->page_size) offset = 0, page++;
    }
}

/*
 * List the rows of the next n tokens, each `bytes` long, that are asked for while those of the
 * h-th head are worked on: a share of all heads' rows, in the order of memory, which is read
 * fastest so.
 */
static void list_ahead(const Attention *a, const Item *item, int h, const void *base,
                       const int64_t *at, int64_t skip, int n, int bytes, Ahead *ahead) {
    int token = h * n / item->heads, head = h * n % item->heads;
    for (int i = 0; i < n; i++) {
        int64_t from = at[token] + (item->head + head) * skip;
        ahead->rows[i] = (const char *)base + from * BYTES[a->kv_type];
        if (++head == item->heads) head = 0, token++;
    }
    ahead->n = n > 0 ? n : 0;
    ahead->bytes = bytes, ahead->row = ahead->byte = 0;
}

/*
 * Ask for the first line of each of n tokens' rows, `skip` on, in one go. Where tokens lie on
 * different pages of memory, the core then translates several addresses at a time; later, between
 * products, it would wait for each.
 */
static void ask_for_tokens(const Attention *a, const void *base, const int64_t *at, int64_t skip,
                           int n) {
    for (int i = 0; i < n; i++)
        __builtin_prefetch((const char *)base + (at[i] + skip) * BYTES[a->kv_type], 0, 2);
}

/* Read rows, unless they are in whole vectors of `type` already, as products take them. */
static void read_rows(const Attention *a, int type, const void *base, const int64_t *at, int64_t skip,
                      int n, int dim, int64_t padded, number *copies, const char **rows) {
    int as_stored = a->kv_type == type && dim == padded;
    for (int i = 0; i < n; i++) {
        const char *from = (const char *)base + (at[i] + skip) * BYTES[a->kv_type];
        rows[i] = as_stored ? from : (const char *)(copies + i * padded);
        if (!as_stored) read_row(a->kv_type, from, dim, (int)padded, copies + i * padded);
    }
}
