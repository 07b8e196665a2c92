// Methods from top to bottom: points are outputs, the grey band is the error of sampling.
charts.sampling = (place, { sampling }) => {
  const rows = sampling.rows.filter(row => !row.refusal);
  const wide = place.clientWidth;
  const panels = [
    { name: 'mean_error', centre: 0, title: 'error of the mean, in standard deviations' },
    { name: 'variance_ratio', centre: 1, title: 'variance over the sampled one' },
  ];
  place.append(key(['var(--blue)', 'an output'], ['var(--band)', 'two standard errors of sampling']));
  const box = node('div', { class: 'beside' });
  place.append(box);
  const width = wide > 640 ? Math.floor((wide - 20) / 2) : wide;
  for (const panel of panels) box.append(node('div', {}, points(sampling, rows, panel, width, place.dataset.label)));
};

function points(sampling, rows, { name, centre, title }, width, label) {
  const row = 30, left = 134, right = width - 16, bottom = row * rows.length + 6, height = bottom + 40;
  const error = 2 * number(sampling.reference[name]);
  const values = rows.flatMap(method => method[name].map(number));
  const scale = linear(extent([...values, centre - error, centre + error]), [left + 10, right]);
  const svg = drawing(width, height, `${label}: ${title}`);
  bottomAxis(svg, scale, [left, right], 0, bottom, title, 5);
  if (Number.isFinite(error)) {
    svg.append(shape('rect', { x: scale(centre - error), width: Math.max(2, scale(centre + error) - scale(centre - error)), y: 0, height: bottom, style: 'fill: var(--band)' }));
  }
  svg.append(shape('line', { x1: scale(centre), x2: scale(centre), y1: 0, y2: bottom, class: 'zero' }));
  rows.forEach((method, i) => {
    const y = row * (i + 0.5) + 3, known = method[name].map(number).filter(Number.isFinite);
    const group = shape('g');
    group.append(shape('rect', { x: 0, y: y - row / 2, width, height: row, fill: 'transparent' }));
    group.append(words(left, y + 4, fitted(method.name, left), 'end'));
    for (const value of known) group.append(shape('circle', { cx: scale(value), cy: y, r: 4, style: 'fill: var(--blue); opacity: .55' }));
    const span = known.length ? `${short(Math.min(...known), 4)} to ${short(Math.max(...known), 4)}` : 'not known';
    svg.append(said(group, `${method.name}\n${title}: ${span}\n${method.verdict}`));
  });
  return svg;
}

charts.amounts = (place, { sampling }) => {
  const rows = sampling.rows.filter(row => !row.refusal);
  const wide = place.clientWidth, columns = wide > 900 ? 4 : wide > 500 ? 2 : 1;
  const width = Math.floor((wide - 20 * (columns - 1)) / columns);
  place.append(key(['var(--blue)', 'method'], ['var(--orange)', 'sampling alone']));
  const box = node('div', { class: 'beside' });
  place.append(box);
  const panels = { covariance_error: 'relative error of the covariance', wasserstein: '2-Wasserstein distance', kl: 'KL divergence, nats', seconds: 'seconds' };
  for (const [name, title] of Object.entries(panels)) box.append(node('div', { style: `flex: 0 0 ${width}px` }, amounts(sampling.reference, rows, name, title, width)));
};

function amounts(reference, rows, name, title, width) {
  const row = 22, left = 112, right = width - 50, bottom = row * rows.length + 26, height = bottom + 22;
  const known = rows.map(method => number(method[name]));
  const own = number(reference[name]);
  const [low, high] = logarithmicExtent([...known, own]);
  const scale = logarithmic([low, high], [left + 6, right]);
  const svg = drawing(width, height, `${title} of every method`);
  svg.append(words(left + 6, 12, title, 'start', 'strong'));
  bottomAxis(svg, scale, [left, right], 20, bottom, '', 3);
  if (own > 0) svg.append(shape('line', { x1: scale(own), x2: scale(own), y1: 20, y2: bottom, style: 'stroke: var(--orange); stroke-width: 2; stroke-dasharray: 5 3' }));
  rows.forEach((method, i) => {
    const y = 20 + row * (i + 0.5) + 3, value = known[i];
    const end = Number.isFinite(value) && value > 0 ? scale(value) : value > 0 ? right : left + 6;
    const group = shape('g');
    group.append(shape('rect', { x: 0, y: y - row / 2, width, height: row, fill: 'transparent' }));
    group.append(words(left, y + 4, fitted(method.name, left), 'end'));
    group.append(shape('rect', { x: left + 6, width: Math.max(1, end - left - 6), y: y - 4, height: 8, rx: 3, style: 'fill: var(--blue); opacity: .7' }));
    group.append(words(end + 5, y + 4, short(value, 2)));
    svg.append(said(group, `${method.name}\n${title}: ${short(value)}\nsampling: ${short(own)}`));
  });
  return svg;
}
