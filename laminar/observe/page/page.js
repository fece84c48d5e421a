// Draws every figure, in the colours that the style sheet has for the reader's light or dark.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function colored(value, style) {
  if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
  if (Array.isArray(value)) return value.map((item) => colored(item, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, colored(item, style)]));
}

function axis(own, style) {
  const color = style.getPropertyValue("--quiet").trim();
  const grid = style.getPropertyValue("--grid").trim();
  return {
    gridcolor: grid, zeroline: false, linecolor: grid, tickcolor: grid, automargin: true,
    tickfont: { size: 12, color }, ...own, title: { ...own.title, font: { size: 12.5, color }, standoff: 8 },
  };
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim();
  figures.forEach((figure, index) => {
    const own = colored(figure.layout, style);
    const layout = {
      height: figure.height_px, margin: { l: 56, r: 14, t: own.annotations ? 26 : 10, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
      font: { family: getComputedStyle(document.body).fontFamily, color: text, size: 12.5 },
      hoverlabel: { font: { size: 12.5 }, bgcolor: style.getPropertyValue("--panel").trim() },
      legend: { orientation: "h", x: 0, y: own.annotations ? 1.1 : 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
      ...own, xaxis: axis(own.xaxis, style), yaxis: axis(own.yaxis, style),
    };
    const options = { responsive: true, displaylogo: false, displayModeBar: false };
    Plotly.react(`figure-${index}`, colored(figure.data, style), layout, options);
  });
}

draw();
dark.addEventListener("change", draw);
