// What the page shows follows from window.EXPLORER (data.js) and the address behind "#" alone.
"use strict";

/** Escape text for HTML. */
const safe = (text) =>
  String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

/** Write microseconds with three digits: "41.2 µs", "3.41 ms". */
const micros = (us) => {
  const [value, unit] = us < 1000 ? [us, "µs"] : [us / 1000, "ms"];
  return `${value.toFixed(Math.max(0, 3 - String(Math.trunc(value)).length))} ${unit}`;
};

/** Read a question from "#model=…&device=…&profile=…"; what is unknown becomes the first there is. */
function question(data, hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const known = (names, name) => (names.includes(name) ? name : names[0]);
  const models = Object.keys(data.models);
  const model = known(models, asked.get("model") ?? "qwen3-8b");
  const device = known(Object.keys(data.devices), asked.get("device"));
  const profile = known(data.devices[device].profiles, asked.get("profile"));
  const filters = { phase: asked.get("phase") ?? "", fits: asked.get("fits") ?? "", find: asked.get("find") ?? "" };
  return { model, device, profile, requests: asked.get("requests") ?? "1", ...filters };
}

/** Write a question as an address. */
const address = (asked) =>
  "#" + new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== "")).toString();

/** Return an answer with its sentences in place of their numbers. */
function answer(data, { model, device, profile }) {
  const raw = data.answers[`${model}|${device}|${profile}`];
  const text = (number) => data.texts[number];
  const verdict = (number) => {
    const [backend, phase, fits, why, us, low, high, covered] = data.verdicts[number];
    const expected = us === undefined ? null : { us, low, high, covered };
    return { backend, phase, fits: Boolean(fits), why: text(why), expected };
  };
  const roles = Object.entries(raw.roles).map(([role, [backend, why]]) => ({ role, backend, why: text(why) }));
  return {
    roles,
    error: raw.error === undefined ? "" : text(raw.error),
    page: raw.page ? { size: raw.page[0], why: text(raw.page[1]) } : null,
    cache: raw.cache ?? "",
    notes: (raw.notes ?? []).map(text),
    commands: (raw.commands ?? []).map(([engine, line, why]) => ({ engine, line: text(line), why: text(why) })),
    verdicts: raw.others.map(verdict),
  };
}

/** Return the role in which a verdict's backend would serve. */
const roleOf = (verdict) => (verdict.phase === "encode" ? "multimodal" : verdict.phase);

/** Say whether a verdict is the one of a chosen backend. */
const chosen = (found, verdict) =>
  found.roles.some(({ role, backend }) => role === roleOf(verdict) && backend === verdict.backend);

/** Keep the verdicts of a phase, those that fit or do not, and those that a text is found in. */
function filtered(verdicts, { phase, fits, find }) {
  const wanted = find.toLowerCase();
  return verdicts.filter(
    (v) =>
      (!phase || v.phase === phase) &&
      (!fits || v.fits === (fits === "yes")) &&
      `${v.backend} ${v.why}`.toLowerCase().includes(wanted),
  );
}

/** Return the plots of a model: one for each layer and phase that has times for so many requests. */
function plots(data, { model, device, profile, requests }) {
  if (profile !== "shipped") return [];
  return data.surfaces
    .filter((s) => s.device === device && s.models.includes(model))
    .map((s) => ({
      title: `${s.phase}, ${s.layer}`,
      lines: Object.entries(s.times)
        .map(([backend, times]) => ({ backend, points: points(data.lengths, times[requests] ?? []) }))
        .filter(({ points }) => points.length),
    }))
    .filter(({ lines }) => lines.length);
}

/** Return a line's points: those lengths that have an estimate. */
const points = (lengths, times) =>
  times.flatMap((time, i) => (time ? [{ length: lengths[i], us: time[0], low: time[1], high: time[2] }] : []));

/** Return the requests that any plot of the question has times for. */
function requestsOf(data, asked) {
  const found = data.surfaces.filter((s) => s.device === asked.device && s.models.includes(asked.model));
  const numbers = found.flatMap((s) => Object.values(s.times).flatMap((times) => Object.keys(times)));
  return [...new Set(numbers)].sort((a, b) => a - b);
}

/** Draw lines over two logarithmic axes, with their bounds, as SVG. */
function svg({ title, lines }, requests) {
  const [width, height, left, right, top, bottom] = [460, 250, 52, 74, 12, 34];
  const all = lines.flatMap((line) => line.points);
  const bounds = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return low === high ? [low / 2, high * 2] : [low, high];
  };
  const axis = ([low, high], from, to) => (value) =>
    from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  const xs = bounds(all.map((p) => p.length));
  const ys = bounds(all.flatMap((p) => [p.low, p.high]));
  const x = axis(xs, left, width - right);
  const y = axis(ys, height - bottom, top);
  const at = (p, key) => `${x(p.length).toFixed(1)},${y(p[key]).toFixed(1)}`;
  const ticks = [...new Set(all.map((p) => p.length))].sort((a, b) => a - b);
  const every = Math.ceil(ticks.length / 6);
  const grid = ticks.map((n, i) => {
    const shown = n < 1024 ? n : `${n / 1024}k`;
    const label = i % every ? "" : `<text x="${x(n)}" y="${height - 18}" text-anchor="middle">${shown}</text>`;
    return `<line class="grid" x1="${x(n)}" x2="${x(n)}" y1="${top}" y2="${height - bottom}"/>${label}`;
  });
  const scale = [ys[0], Math.sqrt(ys[0] * ys[1]), ys[1]].map(
    (us) =>
      `<line class="grid" x1="${left}" x2="${width - right}" y1="${y(us)}" y2="${y(us)}"/>` +
      `<text x="${left - 6}" y="${y(us) + 4}" text-anchor="end">${micros(us)}</text>`,
  );
  let last = -Infinity;
  const ends = new Map(
    lines
      .map((line, i) => [i, y(line.points.at(-1).us) + 4])
      .sort((a, b) => a[1] - b[1])
      .map(([i, place]) => [i, (last = Math.max(place, last + 12))]),
  );
  const drawn = lines.map(({ backend, points: ps }, i) => {
    const band = [...ps.map((p) => at(p, "high")), ...ps.toReversed().map((p) => at(p, "low"))].join(" ");
    const dots = ps.map((p) => `<circle class="f${i % 5}" cx="${x(p.length)}" cy="${y(p.us)}" r="2.5"><title>${safe(backend)}: ${p.length} tokens, ${micros(p.us)} (${micros(p.low)} to ${micros(p.high)})</title></circle>`);
    const label = `<text class="f${i % 5}" x="${x(ps.at(-1).length) + 6}" y="${ends.get(i)}">${safe(backend)}</text>`;
    const path = `<path class="c${i % 5}" d="M${ps.map((p) => at(p, "us")).join("L")}"/>`;
    return `<polygon class="band f${i % 5}" points="${band}"/>${path}${dots.join("")}${label}`;
  });
  const name = `${title}: µs of one call by tokens of a request, ${requests} requests`;
  return (
    `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${safe(name)}">` +
    [...grid, ...scale, ...drawn].join("") +
    `<text x="${(left + width - right) / 2}" y="${height - 3}" text-anchor="middle">tokens of a request</text></svg>`
  );
}

const option = (value, label, asked) =>
  `<option value="${safe(value)}"${value === asked ? " selected" : ""}>${safe(label)}</option>`;

/** Write the decision: a row for each role. */
function decision(found) {
  if (found.error) return `<p class="error">${safe(found.error)}</p>`;
  const cost = (role, backend) => {
    const verdict = found.verdicts.find((v) => roleOf(v) === role && v.backend === backend);
    if (!verdict?.expected) return `<span class="soft">not measured</span>`;
    const { us, low, high, covered } = verdict.expected;
    const part = covered < 1 ? `, over ${Math.round(100 * covered)} % of the passes` : "";
    return `${micros(us)} <span class="soft">(${micros(low)} to ${micros(high)}${part})</span>`;
  };
  const rows = found.roles.map(
    ({ role, backend, why }) =>
      `<tr><th scope="row">${safe(role)}</th><td><b>${safe(backend)}</b></td><td class="number">${cost(role, backend)}</td><td>${safe(why)}</td></tr>`,
  );
  const page = found.page
    ? `<p>Pages of <b>${found.page.size}</b> ${found.page.size === 1 ? "token" : "tokens"}: ${safe(found.page.why)}. Cache: ${safe(found.cache)}.</p>`
    : "";
  const notes = found.notes.length ? `<ul class="soft">${found.notes.map((n) => `<li>${safe(n)}</li>`).join("")}</ul>` : "";
  const head = "<tr><th>role</th><th>backend</th><th>expected, per request and layer</th><th>why</th></tr>";
  const none = found.roles.length ? "" : "<p>The model keeps its own layers.</p>";
  return `<div class="scroll"><table><thead>${head}</thead><tbody>${rows.join("")}</tbody></table></div>${none}${page}${notes}`;
}

const ENGINES = { SGLang: "SGLang", vLLM: "vLLM", attn: "The same answer in a terminal" };

/** Write the commands of the engines. */
const commandLines = (found) =>
  found.commands
    .map(({ engine, line, why }) =>
      line ? `<p class="soft">${ENGINES[engine]}${why ? `: ${safe(why)}` : ""}</p><pre tabindex="0"><code>${safe(line)}</code></pre>` : `<p class="soft">${ENGINES[engine]}: ${safe(why)}</p>`,
    )
    .join("");

/** Write the verdicts on all backends. */
function others(found, asked) {
  const rows = filtered(found.verdicts, asked).map((v) => {
    const cost = v.expected ? micros(v.expected.us) : "";
    const mark = chosen(found, v) ? "selected" : v.fits ? "fits" : "does not fit";
    return `<tr${mark === "selected" ? ' class="chosen"' : ""}><th scope="row">${safe(v.backend)}</th><td>${safe(v.phase)}</td><td class="number">${mark}</td><td class="number">${cost}</td><td>${safe(v.why)}</td></tr>`;
  });
  const head = "<tr><th>backend</th><th>phase</th><th>verdict</th><th>expected</th><th>why</th></tr>";
  return `<div class="scroll"><table><caption>${rows.length} of ${found.verdicts.length} verdicts</caption><thead>${head}</thead><tbody>${rows.join("")}</tbody></table></div>`;
}

/** Write what every device answers for a model. */
function everywhere(data, asked) {
  const rows = Object.entries(data.devices).flatMap(([device, { label, profiles }]) =>
    profiles.map((profile) => {
      const found = answer(data, { ...asked, device, profile });
      const names = found.error ? "none fits" : found.roles.map(({ role, backend }) => `${role} ${backend}`).join(", ");
      const here = device === asked.device && profile === asked.profile;
      const link = `<a href="${safe(address({ ...asked, device, profile }))}"${here ? ' aria-current="true"' : ""}>${safe(label)}</a>`;
      return `<tr${here ? ' class="chosen"' : ""}><th scope="row">${link}</th><td>${safe(profile)}</td><td>${safe(names)}</td><td>${found.page ? found.page.size : ""}</td></tr>`;
    }),
  );
  const head = "<tr><th>device</th><th>ranked by</th><th>backends</th><th>page</th></tr>";
  return `<h2>${safe(asked.model)} on every device</h2><div class="scroll"><table><thead>${head}</thead><tbody>${rows.join("")}</tbody></table></div>`;
}

/** Write the plots, with the number of requests to choose. */
function figures(data, asked) {
  const numbers = requestsOf(data, asked);
  if (numbers.length && asked.profile !== "shipped") {
    return `<p class="soft">The order of priorities takes no times: rank by the shipped profile to see them.</p>`;
  }
  if (!numbers.length) {
    return `<p class="soft">Nothing was measured for these layers here, so that priorities decide. <code>attn tune</code> measures a machine.</p>`;
  }
  const requests = numbers.includes(asked.requests) ? asked.requests : numbers[0];
  const drawn = plots(data, { ...asked, requests }).map(
    (plot) => `<figure><figcaption>${safe(plot.title)}</figcaption>${svg(plot, requests)}</figure>`,
  );
  const select = `<label>Requests <select id="requests">${numbers.map((n) => option(n, n, requests)).join("")}</select></label>`;
  return `<div class="filters">${select}</div><div class="plots">${drawn.join("")}</div><p class="soft">One call of one layer, interpolated between measured points; shaded: the bounds. Lengths that lie between no two points are left out.</p>`;
}

/** Write the whole answer to a question. */
function page(data, asked) {
  const found = answer(data, asked);
  const phases = [...new Set(found.verdicts.map((v) => v.phase))];
  const filters =
    `<label>Phase <select id="phase">${option("", "all", asked.phase)}${phases.map((p) => option(p, p, asked.phase)).join("")}</select></label>` +
    `<label>Verdict <select id="fits">${option("", "all", asked.fits)}${option("yes", "fits", asked.fits)}${option("no", "does not fit", asked.fits)}</select></label>` +
    `<label>Find <input id="find" type="search" value="${safe(asked.find)}"></label>`;
  return (
    `<h2>${safe(asked.model)} <span class="soft">${safe(data.models[asked.model])}</span></h2>${decision(found)}` +
    (found.commands.length ? `<h2>How to serve it</h2>${commandLines(found)}` : "") +
    `<h2>What passes cost</h2>${figures(data, asked)}` +
    `<h2>Why not the others</h2><div class="filters">${filters}</div><div id="others">${others(found, asked)}</div>`
  );
}

/** Connect the page with the address: every choice is in it, so that an answer can be linked. */
function start(data) {
  const get = (id) => document.getElementById(id);
  const go = (change) => {
    location.hash = address({ ...question(data, location.hash), ...change });
  };
  const show = () => {
    const asked = question(data, location.hash);
    const focus = document.activeElement?.id;
    get("model").innerHTML = Object.keys(data.models).map((m) => option(m, m, asked.model)).join("");
    get("device").innerHTML = Object.entries(data.devices).map(([d, { label }]) => option(d, label, asked.device)).join("");
    const ranks = { shipped: "the shipped profile", priorities: "priorities" };
    get("profile").innerHTML = data.devices[asked.device].profiles.map((p) => option(p, ranks[p], asked.profile)).join("");
    get("answer").innerHTML = page(data, asked);
    get("everywhere").innerHTML = everywhere(data, asked);
    const shares = (of) => Object.entries(of).map(([n, share]) => `${n} (${Math.round(100 * share)} %)`).join(", ");
    get("about").innerHTML =
      `<p class="soft">attn-core ${safe(data.version)}. Every library counts as installed and new enough; heads are those of one GPU without tensor parallelism. ` +
      `Times are of this workload: prompts of ${shares(data.workload.prompts)} tokens, ${shares(data.workload.requests)} requests that decode together, ${data.workload.output} new tokens.</p>`;
    document.title = `${asked.model} on ${data.devices[asked.device].label}: attn-core`;
    for (const id of ["phase", "fits", "requests"]) {
      get(id)?.addEventListener("change", (event) => go({ [id]: event.target.value }));
    }
    get("find").addEventListener("input", (event) => {
      history.replaceState(null, "", address({ ...question(data, location.hash), find: event.target.value }));
      const now = question(data, location.hash);
      get("others").innerHTML = others(answer(data, now), now);
    });
    if (focus) get(focus)?.focus();
  };
  for (const id of ["model", "device", "profile"]) {
    get(id).addEventListener("change", (event) => go({ [id]: event.target.value }));
  }
  addEventListener("hashchange", show);
  show();
}

if (typeof module === "undefined") start(window.EXPLORER);
else module.exports = { address, answer, chosen, decision, everywhere, figures, filtered, micros, page, plots, question, requestsOf, svg };
