"use strict";
// Draws the charts, in the page's colours; hides methods in all of them; copies texts. Loads nothing.
(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const narrow = matchMedia("(max-width: 700px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // A finger that moves over a chart scrolls the page; buttons zoom.
  const touch = matchMedia("(pointer: coarse)");
  const hidden = new Set();

  const place = (chart) => document.getElementById(chart.id);
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const colour = (method) => {
    const palette = report.palettes[root.dataset.theme];
    return palette[method % palette.length];
  };
  const faint = (hex, alpha) => {
    const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };

  const LOOKS = {
    band: (c) => ({
      mode: "lines", fill: "toself", fillcolor: faint(c, 0.18), line: { width: 0 }, hoverinfo: "skip",
    }),
    marks: (c) => ({
      mode: "markers", marker: { symbol: "x-thin", size: 5, opacity: 0.5, line: { width: 1, color: c } },
    }),
    rest: (c) => ({ mode: "lines", line: { width: 1, color: c } }),
    line: (c, dash) => ({ mode: "lines", line: { width: 2.2, color: c, dash } }),
  };

  function drawn(trace) {
    const { method, role } = trace.meta;
    const look = LOOKS[role](colour(method), report.methods[method].dash);
    return {
      hovertemplate: "round %{x}: %{y:.4~g}<extra>%{fullData.name}</extra>",
      ...trace, ...look, showlegend: false, visible: !hidden.has(method),
    };
  }

  function laidOut(layout) {
    const axis = {
      gridcolor: css("--grid"), linecolor: css("--rule"), zeroline: false, automargin: true,
      tickfont: { size: 12 },
    };
    const lines = { target: { color: css("--quiet"), width: 1 },
                    switch: { color: css("--quiet"), width: 1.2, dash: "dot" } };
    const title = (a) => ({ ...a.title, font: { size: 13 }, standoff: 8 });
    return {
      ...layout,
      paper_bgcolor: css("--page"), plot_bgcolor: css("--page"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--text") },
      margin: { l: 52, r: 12, t: 28, b: 44 },
      hovermode: "closest",
      hoverlabel: { bgcolor: css("--box"), bordercolor: css("--rule"), font: { color: css("--text") },
                    namelength: -1 },
      dragmode: touch.matches ? false : "zoom",
      modebar: { color: css("--quiet"), activecolor: css("--accent"), bgcolor: "rgba(0,0,0,0)" },
      xaxis: { ...axis, ...layout.xaxis, title: title(layout.xaxis), showgrid: false, showline: true },
      yaxis: { ...axis, ...layout.yaxis, title: title(layout.yaxis),
               nticks: narrow.matches ? 6 : 9 },
      // Above, if faint: below, a grid line at the same height would hide a target.
      shapes: layout.shapes.map((s) => ({ ...s, layer: "above", opacity: 0.6, line: lines[s.name] })),
      annotations: layout.annotations.map((a) => ({ ...a, font: { size: 11, color: css("--quiet") } })),
    };
  }

  const SETTINGS = {
    responsive: true, displaylogo: false,
    // Named one by one: plotly's own choice has one that sends the chart to a server.
    modeBarButtons: touch.matches
      ? [["zoomIn2d", "zoomOut2d", "resetScale2d"]]
      : [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    plotlyServerURL: "", showSendToCloud: false,
  };

  // react keeps the zoom: axes the reader has moved stay where they are.
  function draw() {
    for (const chart of report.charts) {
      const layout = { ...laidOut(chart.layout), uirevision: "the reader's" };
      Plotly.react(place(chart), chart.data.map(drawn), layout, SETTINGS);
    }
    for (const line of document.querySelectorAll("[data-swatch]")) {
      line.setAttribute("stroke", colour(Number(line.dataset.swatch)));
    }
  }

  function themed(name) {
    root.dataset.theme = name;
    const button = document.getElementById("theme");
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${name === "dark" ? "light" : "dark"} colours`);
    draw();
  }

  // What was chosen is kept where the browser lets a file keep something.
  const kept = { get() { try { return localStorage.getItem("fedpa-theme"); } catch { return null; } },
                 set(name) { try { localStorage.setItem("fedpa-theme", name); } catch { /* not kept */ } } };

  async function copied(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      area.className = "unseen";
      area.setAttribute("aria-hidden", "true");
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }

  for (const box of document.querySelectorAll("[data-method]")) {
    box.checked = true; // some browsers remember, the charts do not
    box.addEventListener("change", () => {
      const method = Number(box.dataset.method);
      if (box.checked) hidden.delete(method); else hidden.add(method);
      for (const chart of report.charts) {
        const shown = chart.data.map((trace) => !hidden.has(trace.meta.method));
        if (shown.length) Plotly.restyle(place(chart), { visible: shown });
      }
    });
  }

  for (const button of document.querySelectorAll("[data-copy]")) {
    const name = button.textContent;
    button.addEventListener("click", async () => {
      const done = await copied(document.getElementById(button.dataset.copy).textContent);
      button.textContent = done ? "Copied" : "Select and copy by hand";
      document.getElementById("said").textContent = button.textContent;
      button.focus();
      setTimeout(() => { button.textContent = name; }, 2000);
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    kept.set(name);
    themed(name);
  });
  dark.addEventListener("change", () => { if (!kept.get()) themed(dark.matches ? "dark" : "light"); });
  narrow.addEventListener("change", draw);
  themed(kept.get() || (dark.matches ? "dark" : "light"));
})();
