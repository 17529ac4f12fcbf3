/* One work item: attention of some rows to some keys, tile by tile. Compiled once per level. */
#include "vectors.h"

#include "careful.h"
#include "few.h"
#include "rows.h"
#include "sight.h"
#if LEVEL_NUMBER == 3
#include "tiles.h"
#else
#include "products.h"
#endif

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(what) PASTE(what, LEVEL)
#define LOG2_E 1.44269504f

/* Where a thread keeps what it works on. words and steps: of a row of q and of k, and of p. */
typedef struct {
    number *q, *turned, *p, *keys, *values, *k_rows, *v_rows;
    float *scores, *outputs, *largest, *sums;
    int32_t *depths;
    int64_t words, k_row, v_row, columns;
} Scratch;

static int64_t lay_out(const Attention *a, char *memory, Scratch *s) {
    s->words = round_up(a->head_dim, W * KS) / KS;
    s->columns = out_columns(a);
    s->k_row = s->words * KS;
    if (!a->v && s->columns > s->k_row) s->k_row = s->columns; /* values are read from the keys */
    s->v_row = s->columns;
    int64_t at = 0;
#define TAKE(what, count) \
    s->what = (void *)(memory + at); \
    at = round_up(at + (count) * (int64_t)sizeof *s->what, 64);
    TAKE(q, (ROWS + 16) * s->words * KS) /* products by tiles read whole tiles of rows */
#if LEVEL_NUMBER == 3
    int heads = ROWS / (FEW + 1) < a->kv_heads ? ROWS / (FEW + 1) : a->kv_heads;
    TAKE(turned, heads * TURNED * s->words * KS)
#endif
    TAKE(p, (ROWS + 16) * KEYS)
    TAKE(keys, KEYS * s->words * KS)
    TAKE(values, KEYS * round_up(s->columns, PANEL))
    TAKE(k_rows, KEYS * s->k_row)
    TAKE(v_rows, KEYS * s->v_row)
    TAKE(scores, ROWS * KEYS)
    TAKE(outputs, ROWS * s->columns)
    TAKE(largest, ROWS)
    TAKE(sums, ROWS)
    TAKE(depths, a->drafts)
    return at;
}

int64_t NAME(scratch_)(const Attention *a) {
    Scratch s;
    return lay_out(a, 0, &s);
}

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
 * Turn a row of scores, `scale` times, into probabilities, relative to the largest so far.
 * Returns the factor of what was summed before.
 */
static float soften(const float *scores, int columns, float scale, float *largest_so_far,
                    float *sum_so_far, number *p) {
    vec most = all(*largest_so_far), total = all(0);
    for (int c = 0; c < columns; c += W) most = larger(most, load(scores + c) * scale);
    float before = *largest_so_far, now = largest(most), base = now == -INFINITY ? 0 : now;
    for (int c = 0; c < columns; c += W) {
        vec x = power_of_two((load(scores + c) * scale - base) * LOG2_E);
        total += x;
#if PAIRS
        __m256bh half = _mm512_cvtneps_pbh((__m512)x);
        memcpy(p + c, &half, sizeof half);
#else
        store(p + c, x);
#endif
    }
    float factor = before == now ? 1 : power_of_two(all((before - base) * LOG2_E))[0];
    *largest_so_far = now;
    *sum_so_far = *sum_so_far * factor + sum(total);
    return factor;
}

/* Write a finished row: outputs over their sum with the sink, and its log-sum-exp. */
static void finish(const Attention *a, int64_t token, int head, const float *x, float most,
                   float total) {
    float unit = 1;
    if (a->sinks) {
        float sink = a->sinks[head], base = most > sink ? most : sink;
        if (base == -INFINITY) base = 0;
        unit = expf(most - base);
        total = total * unit + expf(sink - base);
        most = base;
    }
    float factor = total == 0 ? 0 : unit * a->v_scale / total; /* a NaN stays one */
    int64_t at = token * a->out_token + head * a->out_head;
    for (int i = 0; i < a->v_head_dim; i++) put(a->out_type, a->out, at + i, x[i] * factor);
    if (a->lse)
        a->lse[token * a->q_heads + head] = total == 0 ? -INFINITY : most + logf(total);
}

/* Where the unfinished outputs of one head of an item are summed up. */
typedef struct {
    float *x, *largest_so_far, *sums;
} State;

static State state_of(const Attention *a, const Item *item, const Scratch *s, float *states,
                      int h) {
    int rows = item->rows;
    if (!states) return (State){s->outputs + h * rows * s->columns, s->largest + h * rows,
                                s->sums + h * rows};
    /* where the merge will look for it */
    float *x = states + (h * item->splits + item->split) * state_size(a, rows);
    return (State){x, x + rows * s->columns, x + rows * (s->columns + 1)};
}

/*
 * Sum up the outputs over all keys. careful: what a row does not see reaches it neither where it is
 * an infinity or a NaN; this is slow.
 */
INLINE void sum_up(const Attention *a, const Item *item, const Scratch *scratch, float *states,
                  const int careful) {
    const Scratch s = *scratch;
    int request = item->request, rows = item->rows, group = a->q_heads / a->kv_heads;
    int start = a->cu_seqlens_q[request], queries = a->cu_seqlens_q[request + 1] - start;
    int length = a->table ? a->seq_lens[request]
                          : a->cu_seqlens_k[request + 1] - a->cu_seqlens_k[request];
    float cap = a->logit_cap, scale = cap != 0 ? a->scale / cap : a->scale;
    for (int h = 0; h < item->heads; h++) {
        State to = state_of(a, item, &s, states, h);
        memset(to.x, 0, rows * s.columns * sizeof *to.x);
        memset(to.sums, 0, rows * sizeof *to.sums);
        for (int r = 0; r < rows; r++) to.largest_so_far[r] = -INFINITY;
    }
    for (int first = item->first; first < item->end; first += KEYS) {
        int n = item->end - first < KEYS ? item->end - first : KEYS;
        int columns = (int)round_up(n, W), steps = (int)round_up(n, STEP) / KS;
        int64_t k_at[KEYS], v_at[KEYS], next_k[KEYS], next_v[KEYS];
        int after = first + n, next = item->end - after < KEYS ? item->end - after : KEYS;
        const char *k_rows[KEYS], *v_rows[KEYS];
        locate(a, request, first, n, k_at, v_at);
        locate(a, request, after, next, next_k, next_v);
        for (int h = 0; h < item->heads; h++) {
            State to = state_of(a, item, &s, states, h);
            float *x = to.x;
            int64_t head = item->head + h;
            Ahead k_ahead = {.bytes = a->head_dim * BYTES[a->kv_type]}, v_ahead = {0};
            k_ahead.n = list_ahead(a, item, h, a->k, next_k, a->k_head, next, k_ahead.rows);
            read_rows(a, a->k, k_at, head * a->k_head, n, a->head_dim, s.k_row, s.k_rows, k_rows);
            const number *q = s.q + h * rows * s.words * KS;
            if (rows <= FEW) {
                few_scores(rows, n, (int)s.words, q, k_rows, s.scores, KEYS, &k_ahead);
#if LEVEL_NUMBER == 3
            } else if (rows <= TURNED) {
                scores_of_keys(rows, n, (int)s.words, s.turned + h * TURNED * s.words * KS, k_rows,
                               s.keys, s.scores, &k_ahead);
#endif
            } else {
                pack_keys(k_rows, n, (int)s.words, s.keys, &k_ahead);
                product(rows, columns, (int)s.words, q, s.words, s.keys, s.scores, KEYS, 0);
            }
            for (int r = 0; r < rows; r++) {
                int token = (item->row + r) / group;
                Sight see = sight_of(a, request, token, queries, length, s.depths);
                float *scores = s.scores + r * KEYS;
                int high = see.high - first < n ? see.high - first : n;
                number *p = s.p + r * KEYS;
                int low = see.low - first, plain = cap == 0 && !see.drafts;
                int whole = plain && low <= 0 && high == n && n == columns;
                if (!whole) limit(scores, columns, low, high, scale, cap);
                if (see.drafts)
                    hide_drafts(a, see, s.depths, length - queries, first, n, scores);
                float factor = soften(scores, columns, whole ? scale : 1, to.largest_so_far + r,
                                      to.sums + r, p);
                for (int c = columns; c < steps * KS; c++) p[c] = 0;
                if (factor != 1)
                    for (int c = 0; c < s.columns; c += W)
                        store(x + r * s.columns + c, load(x + r * s.columns + c) * factor);
            }
            if (a->v) {
                v_ahead.bytes = a->v_head_dim * BYTES[a->kv_type];
                v_ahead.n = list_ahead(a, item, h, a->v, next_v, a->v_head, next, v_ahead.rows);
                read_rows(a, a->v, v_at, head * a->v_head, n, a->v_head_dim, s.v_row, s.v_rows,
                          v_rows);
            }
            const char **values = a->v ? v_rows : k_rows;
            if (careful) {
                careful_outputs(rows, (int)s.columns, n, s.p, values, x, s.columns);
            } else if (rows <= FEW && s.columns % (W * KS) == 0) {
                few_outputs(rows, (int)s.columns, n, s.p, KEYS / KS, values, x, s.columns,
                            &v_ahead);
            } else {
                pack_values(values, n, steps, (int)s.columns, s.values, &v_ahead);
                product(rows, (int)s.columns, steps, s.p, KEYS / KS, s.values, x, s.columns, 1);
            }
        }
    }
}

/* Write the rows of all heads or, where a merge comes, leave them. Returns whether all are finite. */
static int write_rows(const Attention *a, const Item *item, const Scratch *s, float *states) {
    vec others = all(0);
    int rows = item->rows, group = a->q_heads / a->kv_heads;
    int start = a->cu_seqlens_q[item->request];
    for (int h = 0; h < item->heads; h++) {
        State from = state_of(a, item, s, states, h);
        for (int r = 0; r < rows; r++) {
            const float *x = from.x + r * s->columns;
            int at = item->row + r;
            others = not_finite(others, x, s->columns);
            if (!states)
                finish(a, start + at / group, (item->head + h) * group + at % group, x,
                       from.largest_so_far[r], from.sums[r]);
        }
    }
    return sum(others) == 0;
}

void NAME(attend_)(const Attention *a, const Item *item, char *memory, float *states) {
    Scratch s;
    lay_out(a, memory, &s);
    int request = item->request, rows = item->rows, group = a->q_heads / a->kv_heads;
    int start = a->cu_seqlens_q[request];
    if (a->tree)
        for (int i = 0; i < a->drafts; i++) s.depths[i] = depth_of(a, request, i);
    begin_products();
    for (int h = 0; h < item->heads; h++) {
        for (int r = 0; r < rows; r++) {
            int at = item->row + r;
            int64_t head = (int64_t)(item->head + h) * group + at % group;
            const char *q = a->q;
            q += BYTES[a->q_type] * ((start + at / group) * a->q_token + head * a->q_head);
            number *to = s.q + (h * rows + r) * s.words * KS;
            read_row(a->q_type, q, a->head_dim, (int)s.words * KS, to);
        }
#if LEVEL_NUMBER == 3
        if (rows > FEW && rows <= TURNED)
            turn_queries(s.q + h * rows * s.words * KS, rows, (int)s.words,
                         s.turned + h * TURNED * s.words * KS);
#endif
    }
    sum_up(a, item, &s, states, 0);
    if (!write_rows(a, item, &s, states)) {
        sum_up(a, item, &s, states, 1);
        write_rows(a, item, &s, states);
    }
    end_products();
}

/* Merge the parts of one head's rows, in the order of the keys, into the first, and write it. */
void NAME(merge_)(const Attention *a, const Item *item, int head, float *states) {
    int rows = item->rows, group = a->q_heads / a->kv_heads;
    int64_t columns = out_columns(a), size = state_size(a, rows);
    for (int r = 0; r < rows; r++) {
        float *x = states + r * columns, most = -INFINITY, total = 0;
        for (int i = 0; i < item->splits; i++) {
            float here = states[i * size + rows * columns + r];
            most = here > most ? here : most;
        }
        float base = most == -INFINITY ? 0 : most;
        for (int i = 0; i < item->splits; i++) {
            const float *part = states + i * size + r * columns;
            const float *largest_of = states + i * size + rows * columns;
            float factor = expf(largest_of[r] - base);
            total += largest_of[rows + r] * factor;
            for (int64_t c = 0; c < columns; c++)
                x[c] = (i ? x[c] : 0) + part[c] * factor;
        }
        int at = item->row + r, start = a->cu_seqlens_q[item->request];
        finish(a, start + at / group, (item->head + head) * group + at % group, x, most, total);
    }
}
