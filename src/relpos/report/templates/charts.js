// The curves: uPlot gives axes, scales and the cursor; markers, whiskers, legend and the box beside the cursor are ours.
const comparison = JSON.parse(document.getElementById("comparison").textContent);
const darkness = matchMedia("(prefers-color-scheme: dark)");
const colourOf = (style) => (darkness.matches ? style.dark : style.light);
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const percent = (value) => (100 * value).toFixed(1) + "%";

function drawMarker(context, marker, x, y, r) {
  const polygon = (points) => {
    context.beginPath();
    points.forEach(([dx, dy], i) => context[i ? "lineTo" : "moveTo"](x + r * dx, y + r * dy));
    context.closePath();
    context.fill();
  };
  const bars = (turn) => {
    context.save();
    context.translate(x, y);
    context.rotate(turn);
    context.fillRect(-1.15 * r, -0.4 * r, 2.3 * r, 0.8 * r);
    context.fillRect(-0.4 * r, -1.15 * r, 0.8 * r, 2.3 * r);
    context.restore();
  };
  const shapes = {
    circle: () => { context.beginPath(); context.arc(x, y, r, 0, 2 * Math.PI); context.fill(); },
    square: () => context.fillRect(x - 0.88 * r, y - 0.88 * r, 1.76 * r, 1.76 * r),
    triangle: () => polygon([[0, -1.15], [1.1, 0.8], [-1.1, 0.8]]),
    down: () => polygon([[0, 1.15], [1.1, -0.8], [-1.1, -0.8]]),
    diamond: () => polygon([[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]]),
    cross: () => bars(Math.PI / 4),
    plus: () => bars(0),
  };
  shapes[marker]();
}

function drawSwatch(canvas, style) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [44, 16];
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.strokeStyle = context.fillStyle = colourOf(style);
  context.lineWidth = 2;
  context.setLineDash(style.dash);
  context.beginPath();
  context.moveTo(0, height / 2);
  context.lineTo(width, height / 2);
  context.stroke();
  drawMarker(context, style.marker, width / 2, height / 2, 4.5);
}

// Whiskers and markers of the shown series, and the line of chance. Neighbours' whiskers stand a little apart.
function drawPoints(chart) {
  return (u) => {
    const context = u.ctx;
    const scale = devicePixelRatio || 1;
    context.save();
    context.beginPath();
    context.rect(u.bbox.left - 8 * scale, u.bbox.top - 8 * scale, u.bbox.width + 16 * scale, u.bbox.height + 16 * scale);
    context.clip();
    if (chart.chance !== null) {
      const y = u.valToPos(chart.chance, "y", true);
      context.strokeStyle = context.fillStyle = variable("--muted");
      context.lineWidth = scale;
      context.setLineDash([scale, 3 * scale]);
      context.beginPath();
      context.moveTo(u.bbox.left, y);
      context.lineTo(u.bbox.left + u.bbox.width, y);
      context.stroke();
      context.setLineDash([]);
      context.font = `${11 * scale}px system-ui, sans-serif`;
      context.textAlign = "left";
      context.textBaseline = "alphabetic";
      // Under the line: what is near chance and better than it stands above.
      context.fillText("chance", u.bbox.left + 4 * scale, y + 11 * scale);
    }
    chart.series.forEach((series, index) => {
      if (!u.series[index + 1].show) return;
      context.strokeStyle = context.fillStyle = colourOf(series.style);
      const apart = Math.min(2.5, 12 / Math.max(1, chart.series.length - 1));
      const nudge = series.low ? apart * scale * (index - (chart.series.length - 1) / 2) : 0;
      const count = series.mean.filter((value) => value !== null).length;
      const every = Math.max(1, Math.round(count / 8));
      let seen = 0;
      chart.x.forEach((value, i) => {
        if (series.mean[i] === null) return;
        if ((seen++ + (series.low ? 0 : index)) % every) return;
        const x = u.valToPos(value, "x", true);
        if (series.low) {
          const [low, high] = [u.valToPos(series.low[i], "y", true), u.valToPos(series.high[i], "y", true)];
          context.lineWidth = 1.4 * scale;
          context.beginPath();
          context.moveTo(x + nudge, low);
          context.lineTo(x + nudge, high);
          [low, high].forEach((end) => {
            context.moveTo(x + nudge - 3 * scale, end);
            context.lineTo(x + nudge + 3 * scale, end);
          });
          context.stroke();
        }
        drawMarker(context, series.style.marker, x, u.valToPos(series.mean[i], "y", true), 4 * scale);
      });
    });
    context.restore();
  };
}

function cursorBox(chart) {
  const box = document.createElement("div");
  box.className = "tip";
  box.hidden = true;
  const show = (value) => (chart.percent ? percent(value) : value.toFixed(3));
  return {
    init: (u) => u.over.append(box),
    setCursor: (u) => {
      const { idx, left, top } = u.cursor;
      box.hidden = idx === null || idx === undefined || left < 0;
      if (box.hidden) return;
      const lines = chart.series
        .map((series, i) => ({ series, value: series.mean[idx], shown: u.series[i + 1].show }))
        .filter((line) => line.shown && line.value !== null)
        .sort((a, b) => b.value - a.value);
      box.replaceChildren();
      const title = document.createElement("b");
      title.textContent = chart.ticks ? chart.ticks[chart.x[idx]] : `step ${chart.x[idx]}`;
      box.append(title);
      lines.forEach(({ series, value }) => {
        const line = document.createElement("div");
        const range = series.low ? ` (${percent(series.low[idx])} to ${percent(series.high[idx])})` : "";
        line.textContent = `${show(value)} ${series.label}${range}`;
        line.style.color = colourOf(series.style);
        box.append(line);
      });
      const right = left + 16 + box.offsetWidth > u.over.clientWidth;
      box.style.left = `${right ? Math.max(-40, left - 16 - box.offsetWidth) : left + 16}px`;
      box.style.top = `${Math.max(0, Math.min(top, u.over.clientHeight - box.offsetHeight))}px`;
    },
  };
}

function makeChart(holder, chart, hidden) {
  const ink = variable("--muted");
  const grid = { stroke: variable("--line"), width: 1 };
  const font = "12px system-ui, sans-serif";
  const axis = { stroke: ink, grid, ticks: { stroke: variable("--line"), size: 4 }, font, labelFont: font, labelSize: 18 };
  const across = { ...axis, size: 30, label: chart.xLabel, grid: { show: !chart.ticks, ...grid } };
  if (chart.ticks) {
    across.splits = () => chart.x;
    across.values = (u, splits) => splits.map((value) => chart.ticks[value]);
  }
  const up = { ...axis, size: 52, label: chart.yLabel };
  if (chart.percent) up.values = (u, splits) => splits.map((value) => `${Math.round(100 * value)}%`);
  const [first, last] = [chart.x[0], chart.x[chart.x.length - 1]];
  const margin = (chart.ticks ? 0.07 : 0.015) * (last - first || 1);
  return new uPlot(
    {
      width: holder.clientWidth,
      height: 290,
      legend: { show: false },
      padding: [10, 12, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: () => [first - margin, last + margin] }, y: chart.percent ? { range: () => [0, 1.02] } : {} },
      axes: [across, up],
      series: [
        {},
        ...chart.series.map((series) => ({
          label: series.label,
          show: !hidden.has(series.mechanism),
          stroke: colourOf(series.style),
          width: 2,
          dash: series.style.dash,
          spanGaps: true,
          points: { show: false },
        })),
      ],
      plugins: [{ hooks: { draw: drawPoints(chart), ...cursorBox(chart) } }],
    },
    [chart.x, ...chart.series.map((series) => series.mean)],
    holder,
  );
}

function section(name) {
  const root = document.getElementById(`${name}-charts`);
  if (!root) return;
  const hidden = new Set();
  let plots = [];
  const styles = new Map();
  comparison[name].forEach((chart) => chart.series.forEach((s) => styles.has(s.mechanism) || styles.set(s.mechanism, s.style)));
  const legend = root.querySelector(".legend");
  const buttons = [...styles].map(([mechanism, style]) => {
    const button = document.createElement("button");
    const swatch = document.createElement("canvas");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.append(swatch, mechanism);
    button.addEventListener("click", () => {
      const show = hidden.delete(mechanism) || (hidden.add(mechanism), false);
      button.setAttribute("aria-pressed", String(show));
      plots.forEach(({ plot, chart }) =>
        chart.series.forEach((series, i) => series.mechanism === mechanism && plot.setSeries(i + 1, { show })));
    });
    legend.append(button);
    return { swatch, style };
  });
  const draw = () => {
    plots.forEach(({ plot }) => plot.destroy());
    buttons.forEach(({ swatch, style }) => drawSwatch(swatch, style));
    plots = comparison[name].map((chart) => {
      const card = document.getElementById(`chart-${chart.id}`);
      const key = card.querySelector(".key");
      key.replaceChildren();
      // Where growth rules tell curves apart, the legend of mechanisms does not name them all.
      if (chart.series.some((series) => series.label !== series.mechanism)) {
        chart.series.forEach((series) => {
          const item = document.createElement("li");
          const swatch = document.createElement("canvas");
          drawSwatch(swatch, series.style);
          item.append(swatch, series.label);
          key.append(item);
        });
      }
      return { chart, plot: makeChart(card.querySelector(".chart"), chart, hidden) };
    });
  };
  draw();
  darkness.addEventListener("change", draw);
  new ResizeObserver(() => plots.forEach(({ plot }) => {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: 290 });
  })).observe(root);
}

section("robustness");
section("training");
