"use strict";
// Puts a chart that zooms in the place of each picture. What files say is only ever set as text.
(() => {
  const charts = JSON.parse(document.getElementById("chart-data").textContent);
  const over = document.getElementById("over");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return size >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : Number(value.toPrecision(3)).toString();
  };
  // Labels of an axis: each with the digits that tell it from its neighbours.
  const ticksOf = (values) => {
    const step = Math.abs(values[1] - values[0]) || Math.abs(values[0]) || 1;
    const top = Math.max(...values.map(Math.abs)), power = (value) => Math.floor(Math.log10(value));
    return values.map((value) => {
      const size = Math.abs(value);
      if (size < step / 1e6) return "0";
      const digits = Math.min(15, Math.max(1, power(size) - power(step) + 2));
      if (top >= 1e15 || top < 1e-3) return Number(value.toPrecision(digits)).toExponential();
      for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
        if (size >= unit && step >= unit / 100) return Number((value / unit).toPrecision(digits)) + name;
      return Number(value.toPrecision(digits)).toString();
    });
  };
  // The width of the vertical axis: as its longest label takes, and the same in most charts.
  const room = (plot, labels, axis, cycle) => {
    if (cycle > 1 || !labels) return plot.axes[axis]._size || 52;
    plot.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    return Math.max(52, ...labels.map((label) => 18 + Math.ceil(plot.ctx.measureText(label).width / devicePixelRatio)));
  };

  // Each run's columns, its middle line first: uPlot wants all over one x.
  const columnsOf = (series) => [series.y, ...(series.band || []), ...series.seeds];
  // What a chart is over: what is chosen, or iterations where its runs take no steps.
  const overOf = (chart) => (chart.over === "steps" ? over.value : chart.over);
  // All charts begin and end where the longest line does, so that they line up: empty points stand there.
  const extentOf = (x) => {
    const ends = charts.filter((chart) => overOf(chart) === x).flatMap((chart) => chart.series.flatMap(({ x: { [x]: at } }) => [at[0], at[at.length - 1]]));
    return [Math.min(...ends), Math.max(...ends)];
  };
  const tableOf = (chart, x) => {
    const [first, end] = extentOf(x), frame = first < end ? [[first, end], [null, null]] : [[first], [null]];
    const [at, , ...columns] = uPlot.join([frame, ...chart.series.map((series) => [series.x[x], ...columnsOf(series)])]);
    return [at, ...columns];
  };

  // Lines of one colour differ in these, as the pictures' do.
  const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]];
  const linesOf = (chart) => {
    const lines = [{}], bands = [], middles = [];
    for (const series of chart.series) {
      const ink = color(`--c${series.color % 8}`);
      const spanGaps = true, points = { show: series.y.length === 1 };
      middles.push(lines.length);
      lines.push({ stroke: ink, width: 2, spanGaps, points, dash: DASHES[Math.floor(series.color / 8) % 4] });
      if (series.band) {
        bands.push({ series: [lines.length + 1, lines.length], fill: ink + "2e" });
        for (const _ of series.band) lines.push({ stroke: "transparent", width: 0, spanGaps, points: { show: false } });
      }
      for (const _ of series.seeds) lines.push({ stroke: ink + "59", width: 0.8, spanGaps, points: { show: false } });
    }
    return { lines, bands, middles };
  };

  // The newest value of a line at a place; none before its first and behind its last.
  const valueAt = (column, index) => {
    const there = (value) => value !== null && value !== undefined;
    return column.slice(index).some(there) ? column.slice(0, index + 1).findLast(there) : null;
  };

  const draw = (figure, chart) => {
    const place = figure.querySelector(".plot"), values = figure.querySelectorAll(".value");
    const at = figure.querySelector(".at"), x = overOf(chart), data = tableOf(chart, x);
    const what = [...over.options].find((option) => option.value === x).textContent;
    const { lines, bands, middles } = linesOf(chart);
    const ink = color("--ink-soft"), grid = { stroke: color("--line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const tell = (plot) => {
      const index = plot.cursor.idx;
      const known = index !== null && index !== undefined;
      at.textContent = known ? `${what}: ${short(x === "time" ? data[0][index] : Math.round(data[0][index]))}` : "";
      middles.forEach((line, run) => { values[run].textContent = known ? short(valueAt(data[line], index)) : ""; });
    };
    const size = () => ({ width: Math.max(200, place.clientWidth), height: chart.large ? (place.clientWidth < 500 ? 240 : 320) : 190 });
    figure.classList.add("drawn");
    place.replaceChildren();
    figure.plot = new uPlot({
      ...size(), series: lines, bands, legend: { show: false }, scales: { x: { time: false } },
      cursor: { drag: { x: true, y: false }, sync: { key: x } }, hooks: { setCursor: [tell] },
      axes: [
        { ...axis, space: 60, values: (_, ticks) => ticksOf(ticks) },
        { ...axis, size: room, values: (_, ticks) => ticksOf(ticks) },
      ],
    }, data, place);
    figure.size = size;
  };

  const move = (plot, what) => {
    const whole = plot.data[0], first = whole[0], end = whole[whole.length - 1];
    const { min, max } = plot.scales.x, span = max - min;
    const [from, to] = {
      in: [min + span / 4, max - span / 4], out: [min - span / 2, max + span / 2],
      left: [min - span / 4, max - span / 4], right: [min + span / 4, max + span / 4], all: [first, end],
    }[what];
    const width = Math.min(to - from, end - first);
    const start = Math.max(first, Math.min(from, end - width));
    plot.setScale("x", { min: start, max: start + width });
  };

  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const drawAll = () => figures.forEach((figure) => {
    if (figure.plot) figure.plot.destroy();
    draw(figure, charts[Number(figure.dataset.chart)]);
  });
  if (!figures.length) return;
  document.querySelector(".over").hidden = false;
  for (const figure of figures) {
    figure.querySelector(".tools").hidden = false;
    figure.querySelector(".tools").addEventListener("click", (event) => {
      const what = event.target.dataset.do;
      if (what) move(figure.plot, what);
    });
  }
  drawAll();
  over.addEventListener("change", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const { plot, size } = target.closest("figure");
      const wanted = size();
      if (plot.width !== wanted.width || plot.height !== wanted.height) plot.setSize(wanted);
    }
  });
  figures.forEach((figure) => watch.observe(figure.querySelector(".plot")));
})();
