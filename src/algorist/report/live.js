"use strict";
// Asks where the run is, says it in the bar above, and loads the page anew when the run has grown.
(() => {
  const bar = document.getElementById("live");
  const every = 1000 * Number(bar.dataset.every);
  const loaded = Date.now();
  const base = location.pathname.endsWith("/") ? location.pathname : `${location.pathname}/`;
  const clock = (s) => (s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

  function busy() {
    const inUse = [...document.querySelectorAll("input, select, details[open]")]
      .some((e) => e === document.activeElement || (e.type === "search" && e.value) || e.tagName === "DETAILS");
    return inUse || !document.getSelection().isCollapsed;
  }

  function show(state) {
    const parts = [state.running ? "running" : state.steps && state.step >= state.steps ? "finished" : "not running"];
    if (state.stage) parts.push(`${state.stage} ${state.step}${state.steps ? `/${state.steps}` : ""}`);
    if (state.running && state.seconds_left !== null) parts.push(`about ${clock(state.seconds_left)} left in this stage`);
    if (state.seconds_since_last_line !== null) parts.push(`last line ${clock(state.seconds_since_last_line)} ago`);
    bar.querySelector("span").textContent = parts.join(" · ");
    bar.querySelector("ul").replaceChildren(...state.findings.map((text) => {
      const line = document.createElement("li");
      line.textContent = text;
      return line;
    }));
  }

  async function ask() {
    try {
      const reply = await fetch(`${base}state`, { cache: "no-store" });
      if (!reply.ok) throw new Error(await reply.text());
      const state = await reply.json();
      show(state);
      const newer = state.version !== bar.dataset.version;
      if (newer && !busy() && Date.now() - loaded > Math.max(5000, every)) location.reload();
      bar.querySelector("a").hidden = !(newer && busy());
    } catch (error) {
      bar.querySelector("span").textContent = `algorist watch does not answer any more (${error.message})`;
    }
    setTimeout(ask, every);
  }
  ask();
})();
