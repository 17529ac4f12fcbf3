/* What a query sees: of a causal request, of a window and of a tree of drafts. */
#pragma once
#include <math.h>

#include "attention.h"

/* What a request has: queries, and keys in all. */
static inline int queries_of(const Attention *a, int request) {
    return a->cu_seqlens_q[request + 1] - a->cu_seqlens_q[request];
}

static inline int length_of(const Attention *a, int request) {
    return a->cu_seqlens_k ? a->cu_seqlens_k[request + 1] - a->cu_seqlens_k[request]
                           : a->seq_lens[request];
}

/* How many other drafts a draft sees: its position counts from the prefix. */
static inline int depth_of(const Attention *a, int request, int draft) {
    const uint8_t *seen = a->tree + ((int64_t)request * a->drafts + draft) * a->drafts;
    int depth = -1;
    for (int i = 0; i < a->drafts; i++) depth += seen[i] != 0;
    return depth;
}

/* What one query sees: keys [low, high), of drafts only those of its row of the tree. */
typedef struct {
    int low, high, position;
    const uint8_t *drafts;
} Sight;

static inline Sight sight_of(const Attention *a, int request, int token, int queries, int length,
                      const int32_t *depths) {
    int prefix = length - queries, position = prefix + token;
    Sight see = {0, length, position, NULL};
    if (a->tree) {
        see.drafts = a->tree + ((int64_t)request * a->drafts + token) * a->drafts;
        see.position = prefix + depths[token];
    } else if (a->causal) {
        see.high = position + 1;
    }
    if (a->window && see.position - a->window >= 0) see.low = see.position - a->window + 1;
    if (a->tree && see.low > prefix) see.low = prefix; /* drafts may be in any order */
    return see;
}

/* Hide from a row of scores [n] of keys from `first` the drafts that its query does not see. */
static inline void hide_drafts(const Attention *a, Sight see, const int32_t *depths, int prefix,
                        int first, int n, float *scores) {
    for (int key = first > prefix ? first : prefix; key < first + n; key++) {
        int draft = key - prefix;
        int old = a->window && prefix + depths[draft] <= see.position - a->window;
        if (old || !see.drafts[draft]) scores[key - first] = -INFINITY;
    }
}
