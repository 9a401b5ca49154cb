"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const charts = [...document.querySelectorAll("[data-figure]")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const COLOURS = new Set(["color", "fillcolor", "colorscale"]);
  const SCALE = 4;

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

  // What stands for a colour in a figure, as charts.py says.
  function colour(token) {
    const [name, opacity] = token.slice(1).split("/");
    let rgb;
    if (name.startsWith("scale:")) {
      const place = Math.min(Math.max(Number(name.slice(6)), 0), 1) * SCALE;
      const below = Math.min(Math.floor(place), SCALE - 1);
      const [low, high] = [below, below + 1].map((i) => channels(variable(`scale${i}`)));
      rgb = low.map((x, i) => Math.round(x + (place - below) * (high[i] - x)));
    } else {
      rgb = channels(variable(name));
    }
    return opacity === undefined ? `rgb(${rgb})` : `rgba(${rgb},${opacity})`;
  }

  function coloured(value, isColour = false) {
    if (typeof value === "string") return isColour && value.startsWith("@") ? colour(value) : value;
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" && !isColour ? value : value.map((x) => coloured(x, isColour));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, x]) => [key, coloured(x, COLOURS.has(key))]));
  }

  function merged(base, more) {
    const result = { ...base };
    for (const [key, value] of Object.entries(more)) {
      const both = value && result[key] && [value, result[key]].every((x) => typeof x === "object" && !Array.isArray(x));
      result[key] = both ? merged(result[key], value) : value;
    }
    return result;
  }

  function layout(figure, narrow) {
    const axis = {
      color: variable("muted"), gridcolor: variable("grid"), zerolinecolor: variable("grid"), automargin: true,
      title: { standoff: 8, font: { size: 12 } }, tickfont: { size: 11 }, nticks: narrow ? 5 : 8, exponentformat: "e",
    };
    const family = getComputedStyle(document.body).fontFamily;
    const base = {
      autosize: true,
      dragmode: touch.matches ? false : "zoom",
      font: { family, size: 12, color: variable("ink") },
      hoverlabel: { align: "left", bgcolor: variable("surface"), bordercolor: variable("muted"), font: { family, color: variable("ink") } },
      hovermode: "x unified",
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" },
      margin: { l: 44, r: narrow ? 8 : 14, t: 8, b: 28 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("muted"), activecolor: variable("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: figure.data.some((trace) => trace.showlegend),
      xaxis: axis, yaxis: axis,
    };
    return merged(base, coloured(figure.layout));
  }

  function draw(chart) {
    const figure = figures[Number(chart.dataset.figure)];
    const choice = Number(chart.dataset.choice || 0);
    const data = figure.data.map((trace, i) => {
      const by = figure.chosenBy[i] ?? null;
      return { ...coloured(trace), visible: by === null || by === choice };
    });
    // Only these buttons: plotly has one that sends the chart to its makers.
    const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
    const config = { responsive: true, displaylogo: false, displayModeBar: touch.matches ? false : "hover", modeBarButtons: buttons };
    return Plotly.react(chart, data, layout(figure, chart.clientWidth < 480), config);
  }

  async function drawAll() {
    for (const chart of charts) {
      await draw(chart);
      await new Promise((resume) => setTimeout(resume));
    }
    document.documentElement.dataset.drawn = charts.length;
  }

  for (const select of document.querySelectorAll("[data-for]")) {
    select.addEventListener("change", () => {
      const chart = charts[Number(select.dataset.for)];
      chart.dataset.choice = select.value;
      draw(chart);
    });
  }
  dark.addEventListener("change", drawAll);
  drawAll();
})();
