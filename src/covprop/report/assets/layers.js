// Steps of the network from left to right, and the chosen one.
charts.steps = (place, { layers }) => {
  const steps = layers.steps, width = place.clientWidth, left = 58, right = width - 10;
  const sampled = steps.some(step => step.kolmogorov);
  const space = (right - left) / steps.length;
  const labels = space >= 13;
  const panels = [
    { title: 'standard deviation', high: 150, draw: drawSpread },
    { title: 'largest correlation', high: 70, draw: drawCorrelation },
    ...(sampled ? [{ title: 'distance from Gaussian (Kolmogorov), worst element', high: 80, draw: drawDistance }] : []),
  ];
  const gap = 34, longest = Math.min(118, 7 * Math.max(...steps.map(step => step.name.length)));
  const names = labels ? 8 + 0.87 * longest : 20;
  const height = panels.reduce((sum, panel) => sum + panel.high + gap, 0) + names;
  const svg = drawing(width, height, place.dataset.label);
  const x = i => left + space * (i + 0.5);
  svg.append(shape('rect', { x: left + space * state.step, y: 4, width: space, height: height - names - 4, rx: 4, class: 'chosen' }));
  let top = gap - 8;
  for (const panel of panels) {
    panel.draw(svg, layers, x, space, top, top + panel.high, left, right, panel.title);
    top += panel.high + gap;
  }
  steps.forEach((step, i) => {
    if (labels) {
      const at = height - names + 2;
      const label = words(x(i) + 4, at, fitted(step.name, 118), 'end', i === state.step ? 'strong' : '');
      label.setAttribute('transform', `rotate(-60 ${x(i) + 4} ${at})`);
      svg.append(label);
    }
    const cover = shape('rect', { x: left + space * i, y: 0, width: space, height: height - names, fill: 'transparent', class: 'choose', click: () => choose('step', i) });
    svg.append(said(cover, stepWords(step)));
  });
  if (!labels) svg.append(words(left, height - 4, `${steps.length} steps, from the input to the output`));
  place.append(node('label', { class: 'pick' }, 'Step ', picker('step', steps.map((step, i) => `${i} · ${step.name}`))), svg);
};

function stepWords(step) {
  const [, low, middle, high] = step.quantiles;
  const bent = step.kolmogorov ? `\nKolmogorov ${short(step.kolmogorov[1], 2)}` : '';
  return `${step.name}\nstandard deviation ${short(middle)} (${short(low)} to ${short(high)})\nlargest correlation ${short(step.correlation)}${bent}`;
}

function drawSpread(svg, layers, x, space, top, bottom, left, right, title) {
  const rows = layers.steps.map(step => step.quantiles.map(number));
  // Units that hardly vary, as a ReLU that is off, would take up the whole axis: the band may leave it below.
  const [least] = logarithmicExtent(rows.map(row => row[2])), [low, high] = logarithmicExtent(rows.flatMap(row => row.slice(1, 4)));
  const y = logarithmic([Math.max(low, Math.min(least, high) / 10), high], [bottom, top]);
  const at = value => Math.min(bottom, Math.max(top, value > 0 ? y(value) : bottom));
  leftAxis(svg, y, top, bottom, left, right, title, 4);
  const band = [...rows.map((row, i) => [x(i), at(row[3])]), ...rows.map((row, i) => [x(i), at(row[1])]).reverse()];
  svg.append(shape('polygon', { points: band.filter(point => point.every(Number.isFinite)).map(point => point.join(',')).join(' '), style: 'fill: var(--blue); opacity: .25' }));
  svg.append(curve(rows.map((row, i) => [x(i), at(row[2])]), 'var(--blue)'));
  rows.forEach((row, i) => svg.append(shape('circle', { cx: x(i), cy: at(row[2]) || bottom, r: 3, style: 'fill: var(--blue)' })));
}

function drawCorrelation(svg, layers, x, space, top, bottom, left, right, title) {
  const y = linear([0, 1], [bottom, top]);
  leftAxis(svg, y, top, bottom, left, right, title, 2);
  layers.steps.forEach((step, i) => {
    const value = number(step.correlation) || 0;
    svg.append(shape('rect', { x: x(i) - space * 0.3, width: space * 0.6, y: y(value), height: bottom - y(value), rx: 2, style: 'fill: var(--blue); opacity: .75' }));
  });
}

function drawDistance(svg, layers, x, space, top, bottom, left, right, title) {
  const values = layers.steps.map(step => step.kolmogorov ? number(step.kolmogorov[1]) : NaN);
  const most = Math.max(0.1, ...values.filter(Number.isFinite));
  const y = linear([0, most], [bottom, top]);
  leftAxis(svg, y, top, bottom, left, right, title, 3);
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    const bent = value > layers.threshold;
    svg.append(shape('rect', { x: x(i) - space * 0.3, width: space * 0.6, y: y(value), height: bottom - y(value), rx: 2, style: `fill: var(${bent ? '--orange' : '--blue'}); opacity: .85` }));
  });
  const edge = y(layers.threshold);
  svg.append(shape('line', { x1: left, x2: right, y1: edge, y2: edge, style: 'stroke: var(--soft); stroke-dasharray: 4 3' }));
}

charts.step = (place, { layers }) => {
  const step = layers.steps[state.step], [least, low, middle, high, most] = step.quantiles;
  const panel = node('div', { class: 'panel', 'aria-live': 'polite' }, node('h3', {}, step.name));
  place.append(panel);
  const both = (pair, write) => pair && `${write(pair[0])} median, ${write(pair[1])} worst`;
  panel.append(definitions([
    ['shape', step.shape], ['average mean', short(step.mean)],
    ['standard deviation', `${short(middle)} median; 90 % in ${short(low)} to ${short(high)}; all in ${short(least)} to ${short(most)}`],
    ['largest correlation', short(step.correlation)], ['order of the series', step.series], ['time', step.time],
    ['skewness', both(step.skewness, value => short(value, 2))], ['excess kurtosis', both(step.kurtosis, value => short(value, 2))],
    ['Kolmogorov distance', both(step.kolmogorov, value => short(value, 2))],
    ['error of the mean', step.mean_error && both(step.mean_error, value => short(value, 2)) + ', in standard deviations'],
    ['error of the variance', both(step.variance_error, value => percent(value))],
  ]));
  if (step.noise) panel.append(node('p', {}, judged(step, layers.threshold), ' (', step.noise, '.)'));
  if (step.counts.length) panel.append(node('p', {}, 'Standard deviations of its elements:'), histogram(step, panel.clientWidth - 32));
  if (step.picture) {
    panel.append(node('p', {}, 'Where they are (average over channels and inputs):'));
    pictureMap(panel, step.picture);
  }
};

function judged(step, threshold) {
  const distance = number(step.kolmogorov[1]);
  if (Number.isNaN(distance)) return 'Too little varies here to tell its distribution.';
  if (distance > Math.max(threshold, number(step.kolmogorov_noise))) return 'Not Gaussian: what matters is whether the error of the variance stays small.';
  return 'Close to Gaussian.';
}

function histogram(step, width) {
  const height = 84, bottom = height - 20, most = Math.max(...step.counts);
  const svg = drawing(width, height, 'Histogram of the standard deviations of the elements of the chosen step');
  const [low, high] = step.edges.map(number), x = linear([low, high], [14, width - 14]);
  bottomAxis(svg, x, [0, width], bottom, bottom, '', 4);
  step.counts.forEach((count, i) => {
    const start = x(low + i / step.counts.length * (high - low)), tall = count / most * (bottom - 4);
    svg.append(said(shape('rect', { x: start + 0.5, width: (width - 28) / step.counts.length - 1, y: bottom - tall, height: tall, style: 'fill: var(--blue); opacity: .75' }),
      `${count} elements`));
  });
  return svg;
}
