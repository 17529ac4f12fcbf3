// The logic of the explorer page, run by node: `node explorer_test.js docs/site/explorer`.
"use strict";
const assert = require("node:assert/strict");
const path = require("node:path");
const folder = path.resolve(process.argv[2]);
global.window = {};
require(path.join(folder, "data.js"));
const page = require(path.join(folder, "explorer.js"));
const data = global.window.EXPLORER;

// an address is read back as it was written, and what is unknown becomes what there is
const asked = page.question(data, "#model=qwen3-8b&device=h200&profile=shipped&find=a%26b");
assert.equal(asked.find, "a&b");
assert.deepEqual(page.question(data, page.address(asked)), asked);
const other = page.question(data, "#model=nothing&device=cuda:sm80&profile=shipped");
assert.deepEqual([other.model, other.device, other.profile], [Object.keys(data.models)[0], "cuda:sm80", "priorities"]);
assert.equal(page.question(data, "").model, "qwen3-8b");

// every answer is written whole, whatever it is
for (const key of Object.keys(data.answers)) {
  const [model, device, profile] = key.split("|");
  const one = { ...other, model, device, profile };
  const html = page.page(data, one);
  assert.ok(!/undefined|NaN|\[object|Infinity/.test(html), key);
  const found = page.answer(data, one);
  assert.ok(found.error || found.roles.length || found.notes.length, key);
  for (const { backend } of found.roles) assert.ok(html.includes(`<b>${backend}</b>`), key);
}

// filters keep what they say
const { verdicts } = page.answer(data, asked);
const count = (filter) => page.filtered(verdicts, { phase: "", fits: "", find: "", ...filter }).length;
assert.equal(count({}), verdicts.length);
assert.equal(count({ phase: "prefill" }) + count({ phase: "decode" }), verdicts.length);
assert.equal(count({ fits: "yes" }), verdicts.filter((v) => v.fits).length);
assert.ok(count({ fits: "yes" }) > 1 && count({ fits: "no" }) > 1);
assert.ok(verdicts.filter((v) => v.backend === "fa3").length <= count({ find: "FA3" }));
assert.equal(count({ find: "no such words" }), 0);

// the chosen backend is the cheapest that was measured in its phase, or the reason says which is
const found = page.answer(data, asked);
for (const { role, backend, why } of found.roles) {
  const measured = verdicts.filter((v) => v.phase === role && v.fits && v.expected);
  const best = measured.reduce((a, b) => (a.expected.us <= b.expected.us ? a : b));
  assert.ok(backend === best.backend || why.includes(best.backend));
}

// plots: every measured point is a circle within the picture, and nothing else is
for (const requests of page.requestsOf(data, asked)) {
  for (const plot of page.plots(data, { ...asked, requests })) {
    const svg = page.svg(plot, requests);
    const circles = [...svg.matchAll(/<circle class="f\d" cx="([\d.]+)" cy="([\d.]+)"/g)];
    assert.equal(circles.length, plot.lines.flatMap((line) => line.points).length);
    for (const [, x, y] of circles) assert.ok(x >= 52 && x <= 386.01 && y >= 12 && y <= 216.01, plot.title);
    assert.ok(!/NaN|undefined/.test(svg));
    assert.ok(plot.lines.every(({ points }) => points.every((p) => p.low <= p.us && p.us <= p.high)));
  }
}
assert.equal(page.plots(data, { ...asked, profile: "priorities" }).length, 0);
assert.ok(page.plots(data, { ...asked, requests: "1" }).length > 1);

// text is text
assert.ok(!page.page(data, { ...asked, find: '"><img>' }).includes("<img>"));
assert.equal(page.micros(41.23), "41.2 µs");
assert.equal(page.micros(3412), "3.41 ms");
assert.equal(page.micros(0.5), "0.50 µs");
console.log("ok");
