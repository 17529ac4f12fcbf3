/* One work item: attention of some rows to some keys, tile by tile. Compiled once per level. */
#include "vectors.h"

#include "careful.h"
#include "few.h"
#include "rows.h"
#include "sight.h"
#include "softmax.h"
#if LEVEL_NUMBER == 3
#include "tiles.h"
#else
#include "products.h"
#endif

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(what) PASTE(what, LEVEL)
#include "linear.h"

/* Rows whose scores are there at a time; whole blocks of a product. */
enum { BLOCK = LEVEL_NUMBER == 3 ? 32 : 36 };

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
    TAKE(p, (BLOCK + 16) * KEYS)
    TAKE(keys, KEYS * s->words * KS)
    TAKE(values, KEYS * round_up(s->columns, PANEL))
    TAKE(k_rows, KEYS * s->k_row)
    TAKE(v_rows, KEYS * s->v_row)
    TAKE(scores, BLOCK * KEYS)
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

/* Write a finished row: outputs over their sum with the sink, and its log-sum-exp. */
static void finish(const Attention *a, int64_t token, int head, const float *x, float most,
                   float total) {
    float unit = 1;
    if (a->sinks) {
        float sink = a->sinks[head], base = most > sink ? most : sink;
        if (base == -INFINITY) base = 0;
        unit = expf(most - base);
        total = total * unit + (sink == base ? 1 : expf(sink - base)); /* infinite: less itself NaN */
        most = base;
    }
    float factor = total == 0 ? 0 : unit * a->v_scale / total; /* a NaN stays one */
    int64_t at = token * a->out_token + head * a->out_head;
    if (a->out_type == BF16) { /* in a loop of its own, which becomes vectors */
        uint16_t *out = (uint16_t *)a->out + at;
        for (int i = 0; i < a->v_head_dim; i++) out[i] = to_bf16(x[i] * factor);
    } else {
        for (int i = 0; i < a->v_head_dim; i++) put(a->out_type, a->out, at + i, x[i] * factor);
    }
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

static int least(int a, int b) { return a < b ? a : b; }

/* Keys that are worked on together: n from `first`, and as whole vectors and steps of products. */
typedef struct {
    int first, n, columns, steps;
} Tokens;

/* How many of the keys, in whole vectors, are up to the last that some rows of an item see. */
static int columns_seen(const Attention *a, const Item *item, int row, int some,
                        const Tokens *tokens) {
    if (a->tree) return tokens->columns;
    int group = a->q_heads / a->kv_heads, request = item->request;
    int queries = queries_of(a, request), length = length_of(a, request);
    int low = (item->row + row) / group, high = (item->row + row + some - 1) / group;
    if (sight_of(a, request, low, queries, length, NULL).low >= tokens->first + tokens->n) return 0;
    int last = sight_of(a, request, high, queries, length, NULL).high - tokens->first;
    return last > 0 ? least(tokens->columns, (int)round_up(last, W)) : 0;
}

/* Turn the scores of some rows into what their values weigh, and scale what was summed before. */
static void weigh(const Attention *a, const Item *item, const Scratch *s, const State *to, int row,
                  int some, const Tokens *tokens, int columns) {
    int request = item->request, group = a->q_heads / a->kv_heads, first = tokens->first;
    int queries = queries_of(a, request), length = length_of(a, request);
    int n = tokens->n;
    float cap = a->logit_cap, scale = cap != 0 ? a->scale / cap : a->scale;
    for (int r = row; r < row + some; r++) {
        int token = (item->row + r) / group;
        Sight see = sight_of(a, request, token, queries, length, s->depths);
        float *scores = s->scores + (r - row) * KEYS;
        int low = see.low - first, high = least(see.high - first, n);
        int plain = cap == 0 && scale > 0 && !see.drafts;
        int whole = plain && low <= 0 && high >= columns;
        number *p = s->p + (r - row) * KEYS;
        if (!whole) limit(scores, columns, low, high, scale, cap);
        if (see.drafts) hide_drafts(a, see, s->depths, length - queries, first, n, scores);
        float factor = soften(scores, columns, whole ? scale : 1, to->largest_so_far + r,
                              to->sums + r, p);
        for (int c = columns; c < tokens->steps * KS; c++) p[c] = 0;
        float *x = to->x + r * s->columns;
        if (factor != 1)
            for (int c = 0; c < s->columns; c += W) store(x + c, load(x + c) * factor);
    }
}

/*
 * Sum up the outputs over all keys. careful: what a row does not see reaches it neither where it is
 * an infinity or a NaN; this is slow.
 */
INLINE void sum_up(const Attention *a, const Item *item, const Scratch *scratch, float *states,
                  const int careful) {
    const Scratch s = *scratch;
    int request = item->request, rows = item->rows;
    for (int h = 0; h < item->heads; h++) {
        State to = state_of(a, item, &s, states, h);
        memset(to.x, 0, rows * s.columns * sizeof *to.x);
        memset(to.sums, 0, rows * sizeof *to.sums);
        for (int r = 0; r < rows; r++) to.largest_so_far[r] = -INFINITY;
    }
    const int few = rows <= FEW; /* which gain nothing from packing */
    int whole = a->head_dim == s.k_row && (!a->v || a->v_head_dim == s.v_row);
    int type = few && whole && !careful && a->kv_type == BF16 ? BF16 : NUMBERS;
    /* what is asked for ahead should stay in the cache */
    int wide = few && type == F32;
    const int together = rows <= 6 || wide ? KEYS / 4 : rows <= 16 ? KEYS / 2 : KEYS;
    Places at, then;
    locate(a, request, item->first, least(together, item->end - item->first), &at);
    for (int first = item->first; first < item->end; first += together) {
        int n = least(together, item->end - first), after = first + n;
        int next = least(together, item->end - after);
        Tokens tokens = {first, n, (int)round_up(n, W), (int)round_up(n, STEP) / KS};
        const char *k_rows[KEYS], *v_rows[KEYS], **values = a->v ? v_rows : k_rows;
        locate(a, request, after, next, &then);
        ask_for_tokens(a, a->k, then.k, item->head * a->k_head, next);
        if (a->v) ask_for_tokens(a, a->v, then.v, item->head * a->v_head, next);
        for (int h = 0; h < item->heads; h++) {
            State to = state_of(a, item, &s, states, h);
            int64_t head = item->head + h;
            Ahead k_ahead, v_ahead;
            v_ahead.n = 0;
            list_ahead(a, item, h, a->k, then.k, a->k_head, next, a->head_dim * BYTES[a->kv_type],
                       &k_ahead);
            read_rows(a, type, a->k, at.k, head * a->k_head, n, a->head_dim, s.k_row, s.k_rows, k_rows);
            if (a->v) {
                list_ahead(a, item, h, a->v, then.v, a->v_head, next,
                           a->v_head_dim * BYTES[a->kv_type], &v_ahead);
                read_rows(a, type, a->v, at.v, head * a->v_head, n, a->v_head_dim, s.v_row,
                          s.v_rows, v_rows);
            }
            int turned = LEVEL_NUMBER == 3 && !few && rows <= 16;
            int few_values = few && s.columns % (W * KS) == 0, packed = 0;
            if (!few && !turned) pack_keys(k_rows, n, (int)s.words, s.keys, &k_ahead);
            for (int row = 0; row < rows; row += BLOCK) {
                int some = least(BLOCK, rows - row);
                const number *q = s.q + (h * rows + row) * s.words * KS;
                float *x = to.x + row * s.columns;
                int columns = columns_seen(a, item, row, some, &tokens);
                if (!columns) continue;
                if (few) {
                    few_scores(type, rows, n, (int)s.words, q, k_rows, s.scores, &k_ahead,
                               few_values && !a->v ? 2 : 1);
#if LEVEL_NUMBER == 3
                } else if (turned) {
                    scores_of_keys(rows, n, (int)s.words, s.turned + h * TURNED * s.words * KS,
                                   k_rows, s.keys, s.scores, &k_ahead);
#endif
                } else {
                    product(some, columns, (int)s.words, q, s.words, s.keys, s.scores, KEYS, 0);
                }
                weigh(a, item, &s, &to, row, some, &tokens, columns);
                if (careful) {
                    careful_outputs(some, (int)s.columns, n, s.p, values, x, s.columns);
                } else if (few_values) {
                    few_outputs(type, rows, (int)s.columns, n, s.p, values, x, s.columns,
                                a->v ? &v_ahead : &k_ahead);
                } else {
                    if (!packed++)
                        pack_values(values, n, tokens.steps, (int)s.columns, s.values, &v_ahead);
                    product(some, (int)s.columns, tokens.steps, s.p, KEYS / KS, s.values, x,
                            s.columns, 1);
                }
            }
        }
        at = then;
    }
#if W == 8
    for (int h = 0; type == BF16 && h < item->heads; h++)
        put_in_order(state_of(a, item, &s, states, h).x, rows * s.columns);
#endif
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
