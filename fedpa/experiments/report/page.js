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
  const colour = (method) => report.looks[method][root.dataset.theme === "dark" ? "dark" : "light"];
  // Methods also differ in dashes and markers: plotly's dash → the lengths of its swatch.
  const DASHES = {
    solid: "none", dash: "7 4", dashdot: "7 3 2 3", dot: "2 3", longdash: "11 4",
    longdashdot: "11 3 2 3", "5px 2px 1px 2px": "5 2 1 2",
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
    line: (c, look) => ({
      mode: "lines+markers", line: { width: 2.2, color: c, dash: look.dash },
      marker: { symbol: look.symbol, size: 8, color: c, maxdisplayed: 8 },
    }),
  };

  function drawn(trace) {
    const { method, role } = trace.meta;
    const look = LOOKS[role](colour(method), report.looks[method]);
    return {
      hovertemplate: "round %{x}: %{y:.4~g}<extra>%{fullData.name}</extra>",
      ...trace, ...look, showlegend: false, visible: !hidden.has(method),
    };
  }

  // Targets' names are left and right in turn: they may lie closer together than names are high.
  // Switches' are one above the other, where methods begin in different rounds, on the side with room.
  function annotations(chart) {
    const rounds = chart.data.filter((t) => t.meta.role === "marks").flatMap((t) => t.x.slice(-1));
    const middle = 0.6 * Math.max(0, ...rounds);
    const shared = { yanchor: "bottom", showarrow: false, font: { size: 11, color: css("--quiet") } };
    return [
      ...chart.targets.map((y, k) => ({
        ...shared, xref: "paper", x: k % 2, xanchor: k % 2 ? "right" : "left", y,
        text: `target ${Number(y.toPrecision(6))}`,
      })),
      ...chart.switches.map((x, k) => ({
        ...shared, x, xanchor: x < middle ? "left" : "right", xshift: x < middle ? 3 : -3,
        yref: "paper", y: 0.01 + 0.07 * k, text: "sampling begins",
      })),
    ];
  }

  // Above, if faint: below, a grid line at the same height would hide a target.
  function shapes(chart) {
    const line = { type: "line", layer: "above", opacity: 0.6 };
    const quiet = css("--quiet");
    return [
      ...chart.targets.map((y) => ({
        ...line, xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: quiet, width: 1 },
      })),
      ...chart.switches.map((x) => ({
        ...line, yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: quiet, width: 1.2, dash: "dot" },
      })),
    ];
  }

  function layout(chart) {
    const axis = {
      gridcolor: css("--grid"), linecolor: css("--rule"), zeroline: false, automargin: true,
      tickfont: { size: 12 },
    };
    const title = (text) => ({ text, font: { size: 13 }, standoff: 8 });
    return {
      paper_bgcolor: css("--page"), plot_bgcolor: css("--page"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--text") },
      margin: { l: 52, r: 12, t: 28, b: 44 },
      hovermode: "closest",
      hoverlabel: { bgcolor: css("--box"), bordercolor: css("--rule"), font: { color: css("--text") },
                    namelength: -1 },
      dragmode: touch.matches ? false : "zoom",
      modebar: { color: css("--quiet"), activecolor: css("--accent"), bgcolor: "rgba(0,0,0,0)" },
      xaxis: { ...axis, title: title("round"), showgrid: false, showline: true },
      yaxis: { ...axis, title: title(chart.y), nticks: narrow.matches ? 6 : 9 },
      shapes: shapes(chart),
      annotations: annotations(chart),
      uirevision: "the reader's", // react keeps the zoom: axes the reader has moved stay where they are
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

  function draw() {
    for (const chart of report.charts) {
      Plotly.react(place(chart), chart.data.map(drawn), layout(chart), SETTINGS);
    }
    for (const line of document.querySelectorAll("[data-swatch]")) {
      line.setAttribute(line.tagName === "text" ? "fill" : "stroke", colour(Number(line.dataset.swatch)));
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

  report.methods.forEach((name, method) => {
    const label = document.createElement("label");
    const look = report.looks[method];
    label.innerHTML = `<input type="checkbox" checked data-method="${method}">
      <svg width="34" height="14" aria-hidden="true"><line x1="0" y1="7" x2="34" y2="7" stroke-width="3"
      stroke-dasharray="${DASHES[look.dash]}" data-swatch="${method}"/><text x="17" y="12" font-size="14"
      text-anchor="middle" data-swatch="${method}">${look.glyph}</text></svg>`;
    label.append(Object.assign(document.createElement("span"), { textContent: name }));
    document.getElementById("methods").append(label);
  });

  for (const box of document.querySelectorAll("[data-method]")) {
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
