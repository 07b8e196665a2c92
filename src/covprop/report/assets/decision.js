// A classifier's decision: probabilities of classes, margins, how much noise it takes, and where noise hurts.
function errorBar(scale, y, value, stderr, stroke) {
  const low = scale(Math.max(0, value - 2 * stderr)), high = scale(Math.min(1, value + 2 * stderr));
  return shape('line', { x1: low, x2: high, y1: y, y2: y, style: `stroke: ${stroke}; stroke-width: 2` });
}

charts.classes = (place, { decision }) => {
  const record = element(decision), names = record.classes.map(i => decision.names[i]);
  const width = place.clientWidth, row = 26, left = nameRoom(names), right = width - 62;
  const height = row * names.length + 28, scale = linear([0, 1], [left + 8, right]);
  place.append(key(['var(--blue)', 'analytic'], ['var(--orange)', 'sampled']));
  const svg = drawing(width, height, place.dataset.label);
  bottomAxis(svg, scale, [left, right], 0, height - 26, '', 5);
  const [ours, errors] = record.probabilities, [theirs, spreads] = record.sampled;
  names.forEach((name, i) => {
    const y = row * (i + 0.5), mine = number(ours[i]), seen = number(theirs[i]), kept = record.classes[i] === record.label;
    const line = shape('g');
    line.append(shape('rect', { x: 0, y: y - row / 2, width, height: row, rx: 5, ...(kept ? { class: 'chosen' } : { fill: 'transparent' }) }));
    line.append(words(left, y + 4, fitted(name, left), 'end', kept ? 'strong' : ''));
    line.append(shape('rect', { x: scale(0), width: Math.max(0.5, scale(mine) - scale(0)), y: y - 8, height: 9, rx: 2, style: 'fill: var(--blue); opacity: .75' }));
    line.append(errorBar(scale, y - 3.5, mine, number(errors[i]), 'var(--ink)'));
    line.append(errorBar(scale, y + 6, seen, number(spreads[i]), 'var(--orange)'), shape('circle', { cx: scale(seen), cy: y + 6, r: 3, style: 'fill: var(--orange)' }));
    line.append(words(Math.max(scale(mine), scale(seen)) + 10, y + 4, atAGlance(mine), 'start', kept ? 'strong' : ''));
    svg.append(said(line, `${name}${kept ? ' (the label)' : ''}\nprobability ${withError(mine, errors[i])}\nsampled ${withError(seen, spreads[i])}\nexpected softmax ${short(record.softmax[i])}`));
  });
  place.append(svg);
};

charts.margins = (place, { decision }) => {
  const record = element(decision), names = record.rivals.map(i => decision.names[i]);
  const width = place.clientWidth, row = 26, left = nameRoom(names), right = width - 14, height = row * names.length + 28;
  const reach = data.levels[1];
  const ends = record.margin_mean.flatMap((mean, i) => [number(mean) - reach * number(record.margin_stddev[i]), number(mean) + reach * number(record.margin_stddev[i])]);
  const scale = linear(extent([0, ...ends]), [left + 8, right]);
  const svg = drawing(width, height, place.dataset.label);
  place.append(key(['var(--blue)', 'clear of zero'], ['var(--orange)', 'the 95 % interval reaches zero']));
  bottomAxis(svg, scale, [left, right], 0, height - 26, '', 5);
  svg.append(shape('line', { x1: scale(0), x2: scale(0), y1: 0, y2: height - 26, style: 'stroke: var(--ink); stroke-width: 1.5' }));
  names.forEach((name, i) => {
    const y = row * (i + 0.5), mean = number(record.margin_mean[i]), stddev = number(record.margin_stddev[i]);
    const line = shape('g');
    line.append(shape('rect', { x: 0, y: y - row / 2, width, height: row, fill: 'transparent' }), words(left, y + 4, fitted(name, left), 'end'));
    const close = mean - reach * stddev <= 0;
    if (Number.isFinite(mean)) line.append(...bars(scale, y, mean, stddev, data.levels, close ? 'var(--orange)' : 'var(--blue)', 9));
    svg.append(said(line, `ahead of ${name} by ${short(mean, 4)}\nstandard deviation ${short(stddev)}`));
  });
  place.append(svg);
};

function nameRoom(names) { return Math.min(120, 12 + 7 * Math.max(...names.map(name => name.length))); }

charts.budget = (place, { decision }) => {
  const record = element(decision), [levels, kept] = record.curve.map(values => values.map(number));
  if (levels.length < 2) {
    place.append(node('div', { class: 'panel' }, `${record.reason}.`));
    return;
  }
  const width = place.clientWidth, height = 240, left = 46, right = width - 12, top = 20, bottom = height - 44;
  const positive = levels.filter(level => level > 0), wide = Math.max(...positive) > 50 * Math.min(...positive);
  const x = wide ? logarithmic(logarithmicExtent(positive), [left, right]) : linear([0, 1.05 * Math.max(1, ...levels)], [left, right]);
  const placed = (level, i) => [x(level), y(kept[i])];
  const lowest = Math.min(decision.target, ...kept);
  const y = linear([Math.max(0, lowest - 0.1 * (1 - lowest)), 1], [bottom, top]);
  const svg = drawing(width, height, place.dataset.label);
  leftAxis(svg, y, top, bottom, left, right, 'probability of the label', 5);
  bottomAxis(svg, x, [left, right], top, bottom, 'times this noise', 6);
  const across = (at, stroke) => shape('line', { x1: left, x2: right, y1: at, y2: at, style: `stroke: ${stroke}; stroke-dasharray: 5 4` });
  const down = (at, stroke) => shape('line', { x1: at, x2: at, y1: top, y2: bottom, style: `stroke: ${stroke}; stroke-dasharray: 5 4` });
  svg.append(across(y(decision.target), 'var(--soft)'), down(x(1), 'var(--soft)'), x(1) > right - 70 ? words(x(1) - 4, bottom - 6, 'this noise', 'end') : words(x(1) + 4, bottom - 6, 'this noise'));
  svg.append(curve(levels.map(placed).filter(point => point.every(Number.isFinite)), 'var(--blue)'));
  levels.forEach((level, i) => Number.isFinite(x(level)) && svg.append(said(shape('circle', { cx: x(level), cy: y(kept[i]), r: 3.5, style: 'fill: var(--blue)' }),
    `${short(level, 4)} times this noise\nthe label is kept with ${percent(kept[i], 5)}`)));
  if (record.found) {
    const level = number(record.level), [seen, error] = record.kept_sampled.map(number), at = x(level);
    const within = value => y(Math.min(1, Math.max(0, value)));
    svg.append(down(at, 'var(--orange)'));
    svg.append(shape('line', { x1: at, x2: at, y1: within(seen - 2 * error), y2: within(seen + 2 * error), style: 'stroke: var(--orange); stroke-width: 3' }));
    svg.append(said(shape('circle', { cx: at, cy: within(seen), r: 5, style: 'fill: var(--orange)' }), `sampled there: ${percent(seen, 4)} ± ${percent(error, 2)}`));
  }
  place.append(svg);
};

charts.verdict = (place, { decision }) => {
  const record = element(decision), name = decision.names[record.label];
  const panel = node('div', { class: 'panel', 'aria-live': 'polite' }, node('h3', {}, data.batch.length ? `${data.batch[state.batch]}: ${name}` : name));
  place.append(panel);
  const [wrong, error] = record.wrong, [seen, spread] = record.wrong_sampled;
  if (record.found) panel.append(gauge(number(record.level), panel.clientWidth - 32));
  panel.append(definitions([
    ['label', record.label === record.predicted ? `${name}, which the network also says without noise` : `${name}; without noise the network says ${decision.names[record.predicted]}`],
    ['wrong with probability', withError(wrong, error)],
    ['sampled', withError(seen, spread)],
    ['entropy of the decision', `${short(record.entropy)} nats`],
    ['noise budget', record.written ? `${record.written} times this noise, ${short(record.stddev)} on each element${record.doubt && `; ${record.doubt}`}` : record.reason],
    ['remark', record.written && record.reason !== 'found' ? record.reason : ''],
    [`attack within ${short(record.radius)} (${record.norm}-norm)`, record.robust ? 'found no other class' : 'found another class'],
  ]));
};

// The noise that there is, and how far it may grow.
function gauge(level, width) {
  const height = 46, x = logarithmic([Math.min(level, 1) / 2, Math.max(level, 1) * 2], [6, width - 6]);
  const svg = drawing(width, height, `The noise may be ${short(level)} times as large`);
  const track = (start, end, fill) => shape('rect', { x: start, width: Math.max(0, end - start), y: 18, height: 10, rx: 4, style: `fill: ${fill}` });
  svg.append(track(6, width - 6, 'var(--band)'), track(6, x(level), level < 1 ? 'var(--orange)' : 'var(--blue)'));
  svg.append(shape('line', { x1: x(1), x2: x(1), y1: 12, y2: 34, style: 'stroke: var(--ink); stroke-width: 2.5' }), words(x(1), 45, 'this noise', 'middle'));
  svg.append(words(Math.min(width - 24, Math.max(24, x(level))), 11, `${short(level)} ×`, 'middle', 'strong'));
  return svg;
}

charts.risks = (place, { decision }) => {
  const { names, shown, probability, sampled, stderr, of } = decision.risks;
  const width = place.clientWidth, height = 170, left = 46, right = width - 10, top = 22, bottom = height - 24;
  const most = Math.min(1, 1.1 * Math.max(0.01, ...probability.map(number), ...sampled.map((value, i) => number(value) + 2 * number(stderr[i]))));
  const y = linear([0, most], [bottom, top]), space = (right - left) / names.length;
  const svg = drawing(width, height, place.dataset.label);
  leftAxis(svg, y, top, bottom, left, right, '', 4);
  names.forEach((name, i) => {
    const x = left + space * (i + 0.5), mine = number(probability[i]), seen = number(sampled[i]), error = 2 * number(stderr[i]);
    const bar = shape('g', shown[i] >= 0 ? { class: 'choose', click: () => choose('batch', shown[i]) } : {});
    if (shown[i] === state.batch) bar.append(shape('rect', { x: x - space / 2, width: space, y: top - 14, height: bottom - top + 14, rx: 4, class: 'chosen' }));
    bar.append(shape('rect', { x: x - space / 2, width: space, y: top, height: bottom - top, fill: 'transparent' }));
    bar.append(shape('rect', { x: x - space * 0.3, width: space * 0.6, y: y(mine), height: bottom - y(mine), rx: 2, style: 'fill: var(--blue); opacity: .75' }));
    bar.append(shape('line', { x1: x, x2: x, y1: y(Math.max(0, seen - error)), y2: y(Math.min(most, seen + error)), style: 'stroke: var(--orange); stroke-width: 2' }));
    bar.append(shape('circle', { cx: x, cy: y(seen), r: Math.min(4, Math.max(1.5, space / 4)), style: 'fill: var(--orange)' }));
    svg.append(said(bar, `${name}\nwrong with ${percent(mine, 3)}\nsampled ${percent(seen, 3)} ± ${percent(error / 2, 1)}${shown[i] >= 0 ? '\nclick to choose it' : ''}`));
  });
  const part = of > names.length ? `the ${names.length} riskiest of ${of} inputs` : `${of} inputs`;
  svg.append(words(left, height - 6, `${part}, the riskiest first`));
  place.append(svg);
};

charts.sensitivity = (place, { inputs }) => {
  const { rows, columns, values } = element(inputs).sensitivity_picture;
  heatmap(place, {
    rows, columns, values: values.map(number), centred: true, side: 240 / Math.max(rows, columns), label: place.dataset.label,
    read: (row, column, value) => `row ${row}, column ${column}\n${short(value, 4)} per unit of variance`,
  });
};

charts.sensitivities = (place, { inputs }) => {
  const values = element(inputs).sensitivity.map(number), names = inputs.names;
  const order = values.map((_, i) => i).sort((i, j) => Math.abs(values[j]) - Math.abs(values[i])).slice(0, FEW);
  if (order.length === values.length) order.sort((i, j) => i - j);
  const shown = order.map(i => names[i]);
  const width = place.clientWidth, row = 26, left = nameRoom(shown), right = width - 14, height = row * order.length + 28;
  const scale = linear(extent([0, ...values]), [left + 8, right]);
  const svg = drawing(width, height, place.dataset.label);
  bottomAxis(svg, scale, [left, right], 0, height - 26, '', 4);
  order.forEach((i, k) => {
    const y = row * (k + 0.5), at = Number.isFinite(values[i]) ? scale(values[i]) : scale(0);
    const line = shape('g');
    line.append(shape('rect', { x: 0, y: y - row / 2, width, height: row, fill: 'transparent' }), words(left, y + 4, fitted(names[i], left), 'end'));
    line.append(shape('rect', { x: Math.min(at, scale(0)), width: Math.max(1, Math.abs(at - scale(0))), y: y - 6, height: 12, rx: 2, style: `fill: var(${values[i] > 0 ? '--orange' : '--blue'})` }));
    svg.append(said(line, `${names[i]}\n${short(values[i], 4)} per unit of variance`));
  });
  svg.append(shape('line', { x1: scale(0), x2: scale(0), y1: 0, y2: height - 26, class: 'zero' }));
  place.append(svg);
  if (order.length < values.length) place.append(node('p', { class: 'readout' }, `the ${order.length} of ${values.length} elements that matter most`));
};
