"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // ---- charts -------------------------------------------------------------------------------------------------
  const plots = [];

  /** Exponential moving average, corrected for its start; null stays null. */
  function smooth(values, weight) {
    let sum = 0, mass = 0;
    return values.map((v) => {
      if (v === null || v === undefined) return null;
      sum = weight * sum + (1 - weight) * v;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  }

  /** All curves over the union of their steps. */
  function columns(curves) {
    const steps = [...new Set(curves.flatMap((c) => c.x))].sort((a, b) => a - b);
    const at = new Map(steps.map((s, i) => [s, i]));
    return [steps, curves.map((c) => {
      const column = new Array(steps.length).fill(null);
      c.x.forEach((s, i) => { column[at.get(s)] = c.y[i]; });
      return column;
    })];
  }

  const short = (v) => v === null || v === undefined ? "–"
    : v !== 0 && (Math.abs(v) < 0.001 || Math.abs(v) >= 1e6) ? v.toExponential(1) : String(+v.toPrecision(4));

  /** A flat curve gets an axis around its value; uPlot's own would reach from 0 to 100. */
  function around(plot, low, high) {
    if (low === null || high === null) return [0, 1];
    const room = high > low ? 0.08 * (high - low) : Math.max(0.5 * Math.abs(low), 0.5);
    return [low - room, high + room];
  }

  function plotData(entry) {
    const weight = Number(document.getElementById("smoothing")?.value ?? 0);
    return [entry.steps, ...entry.raw.flatMap((column) => [column, smooth(column, entry.chart.smooth && column.length > 8 ? weight : 0)])];
  }

  function draw(entry) {
    entry.plot?.destroy();
    const { chart, host } = entry;
    const axis = { stroke: () => color("--quiet"), grid: { stroke: () => color("--line"), width: 1 },
      ticks: { stroke: () => color("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const series = chart.curves.flatMap((curve, i) => {
      const tint = color(`--c${i % 8}`);
      return [
        { label: `${curve.label} (raw)`, class: "raw", stroke: tint, alpha: 0.3, width: 1, spanGaps: true, points: { show: false } },
        { label: curve.label, stroke: tint, width: 2, spanGaps: true, points: { show: entry.steps.length < 12, size: 5, fill: tint },
          value: (_, v) => short(v) },
      ];
    });
    entry.plot = new uPlot({
      width: host.clientWidth, height: 210,
      cursor: { sync: { key: entry.stage }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: chart.share ? { range: [0, 1] } : { range: around } },
      axes: [{ ...axis, size: 34, label: "step", labelSize: 16, labelFont: "12px system-ui, sans-serif", incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] }, { ...axis, size: 58, values: (_, ticks) => ticks.map(short) }],
      series: [{ label: "step" }, ...series],
      hooks: { setSeries: [(u, i, opts) => {
        if (i && i % 2 === 0 && opts && opts.show !== undefined) u.setSeries(i - 1, { show: opts.show });
      }] },
    }, plotData(entry), host);
  }

  for (const section of document.querySelectorAll("section.stage")) {
    const stage = data.stages.find((s) => s.name === section.dataset.stage);
    section.querySelectorAll(".plot").forEach((host, i) => {
      const chart = stage.charts[i];
      const [steps, raw] = columns(chart.curves);
      const entry = { chart, host, steps, raw, stage: stage.name, plot: null };
      plots.push(entry);
      draw(entry);
      new ResizeObserver(() => {
        if (host.clientWidth && entry.plot.width !== host.clientWidth) entry.plot.setSize({ width: host.clientWidth, height: 210 });
      }).observe(host);
    });
  }
  document.getElementById("smoothing")?.addEventListener("input", (event) => {
    document.getElementById("smoothing-value").textContent = Number(event.target.value).toFixed(2);
    plots.forEach((entry) => entry.plot.setData(plotData(entry)));
  });
  const redraw = () => plots.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("printing"); redraw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("printing"); redraw(); });

  // ---- completions: every text goes through textContent -------------------------------------------------------
  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined && text !== null) made.textContent = text;
    return made;
  }

  function verdict(correct) {
    if (correct === null || correct === undefined) return element("span", "verdict", "not graded");
    return element("span", correct ? "verdict right" : "verdict wrong", correct ? "✓ right" : "✗ wrong");
  }

  const words = (code) => code ? code.replaceAll("_", " ") : code;

  function facts(parts) {
    const line = element("div", "facts");
    line.append(...parts.filter(Boolean).map((p) => p instanceof Node ? p : element("span", "", p)));
    return line;
  }

  function answer(text, correct) {
    const block = element("pre", correct === true ? "right" : correct === false ? "wrong" : "", text);
    block.dir = "auto";
    return block;
  }

  /** A filtered list that grows by pages. */
  function browser(id, rows, matches, show, order) {
    const section = document.getElementById(id);
    if (!section) return;
    const form = section.querySelector("form"), list = section.querySelector(".list");
    const more = section.querySelector(".more"), count = section.querySelector(".count");
    let found = [], shown = 0;
    const grow = () => {
      const page = found.slice(shown, shown + 12);
      list.append(...page.map(show));
      shown += page.length;
      more.hidden = shown >= found.length;
    };
    const update = () => {
      const wanted = Object.fromEntries(new FormData(form));
      wanted.text = (wanted.text || "").toLowerCase();
      found = rows.filter((row) => matches(row, wanted));
      if (order) found = order(found, wanted);
      count.textContent = `${found.length} of ${rows.length}`;
      list.replaceChildren();
      shown = 0;
      grow();
    };
    form.addEventListener("input", update);
    form.addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", grow);
    update();
  }

  const has = (wanted, ...texts) => !wanted || texts.some((t) => t && t.toLowerCase().includes(wanted));
  const first = (row) => row.sides[0].correct, last = (row) => row.sides[row.sides.length - 1].correct;
  const changes = { "": () => true, gained: (r) => last(r) && !first(r), lost: (r) => first(r) && !last(r),
    right: last, wrong: (r) => !last(r) };

  browser("pairs", data.pairs.rows,
    (row, w) => changes[w.change](row) && has(w.text, row.question, row.gold, ...row.sides.map((s) => s.text)),
    (row) => {
      const item = element("div", "item");
      const question = element("p", "question", row.question);
      question.dir = "auto";
      item.append(question, facts([`answer ${row.gold}`, `problem ${row.id}`]));
      const sides = element("div", "sides");
      row.sides.forEach((side, i) => {
        const block = element("div", "side");
        block.append(facts([element("strong", "", data.pairs.names[i].toUpperCase()), verdict(side.correct), words(side.reason),
          side.extracted ? `read ${side.extracted}` : "no answer read", `${side.tokens ?? "?"} tokens`]),
        answer(side.text, side.correct));
        sides.append(block);
      });
      item.append(sides);
      return item;
    });

  const { rows, prompts } = data.rollouts;
  const options = (name, values) => {
    const select = document.querySelector(`#rollout-filters [name=${name}]`);
    select?.append(...values.map((v) => { const o = element("option", "", String(v)); o.value = String(v); return o; }));
    if (select && !values.length) select.closest("label").hidden = true;
  };
  options("step", [...new Set(rows.map((r) => r.step))].sort((a, b) => a - b));
  options("reason", [...new Set(rows.map((r) => r.reason).filter(Boolean))].sort());

  rows.forEach((row, i) => {
    row.first = i === 0 || ["stage", "step", "group"].some((key) => row[key] !== rows[i - 1][key]);
  });

  browser("rollouts", rows,
    (row, w) => (!w.step || String(row.step) === w.step) && (!w.reason || row.reason === w.reason)
      && (w.low === "" || (row.reward !== null && row.reward >= Number(w.low)))
      && (w.high === "" || (row.reward !== null && row.reward <= Number(w.high)))
      && has(w.text, row.text, prompts[row.prompt], row.problem),
    (row) => {
      const item = element("div", "item");
      const prompt = element("details");
      prompt.append(element("summary", "quiet", "whole prompt"), element("pre", "", prompts[row.prompt]));
      const question = element("div", "turn", prompts[row.prompt].replace(/<\|[^|]*\|>(system|user|assistant)?|\s+/g, " ").trim().slice(-300));
      question.dir = "auto";
      if (row.first) item.classList.add("first");
      item.append(question, facts([`step ${row.step}`, row.correct === null && !row.reason ? null : verdict(row.correct), words(row.reason),
        `reward ${short(row.reward)}`, ...Object.entries(row.rewards).map(([k, v]) => `${k} ${short(v)}`),
        `advantage ${short(row.advantage)}`, `${row.tokens ?? "?"} tokens`, row.truncated ? "truncated" : null,
        row.extracted ? `read ${row.extracted}` : "no answer read", row.gold ? `answer ${row.gold}` : null,
        `group ${row.group}`, `problem ${row.problem}`]),
      answer(row.text, row.correct), prompt);
      return item;
    },
    (found, w) => {
      if (w.sort === "newest") return [...found].sort((a, b) => b.step - a.step || a.group - b.group);
      if (!w.sort) return found;
      const key = w.sort.slice(0, -1), sign = w.sort.endsWith("-") ? -1 : 1;
      return [...found].sort((a, b) => sign * ((a[key] ?? -Infinity) - (b[key] ?? -Infinity)));
    });

  document.documentElement.dataset.ready = "true";
})();
