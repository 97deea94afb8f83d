// The marks of a mechanism: what stands on its points, and the piece of its line in a legend.
const darkness = matchMedia("(prefers-color-scheme: dark)");
const colourOf = (style) => (darkness.matches ? style.dark : style.light);
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

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
  canvas.setAttribute("aria-hidden", "true");
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
  if (style.marker) drawMarker(context, style.marker, width / 2, height / 2, 4.5);
}
