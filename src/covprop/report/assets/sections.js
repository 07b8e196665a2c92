// What each chart shows. A drawing function gets its place, which is empty, and the data of its section.
const FEW = 40; // outputs that get a row each; of more, a band is drawn
const NAMED = 20; // rows of a map that are named beside it

function element(section) { return section.elements[Math.min(state.batch, section.elements.length - 1)]; }

function intervalEnds(record, levels) {
  const reach = levels[levels.length - 1];
  return record.mean.flatMap((mean, i) => [number(mean) - reach * number(record.stddev[i]), number(mean) + reach * number(record.stddev[i])]);
}

function outputWords(names, record, levels, i) {
  const mean = number(record.mean[i]), stddev = number(record.stddev[i]), reach = levels[levels.length - 1] * stddev;
  const sampled = record.sampled
    ? `\nsampled: ${short(record.sampled.mean[i], 4)}, ± ${short(record.sampled.stddev[i], 3)}` : '';
  return `${names[i]}\nmean ${short(mean, 4)}, standard deviation ${short(stddev, 3)}\n95 %: ${short(mean - reach, 4)} to ${short(mean + reach, 4)}${sampled}`;
}

function drawIntervals(place, names, record, levels, chosen, choose) {
  const sampled = record.sampled;
  if (sampled) place.append(key(['var(--blue)', 'analytic'], ['var(--orange)', 'sampled']));
  if (names.length > FEW) return drawBand(place, names, record, levels, chosen, choose);
  const width = place.clientWidth, row = 26, left = nameRoom(names);
  const height = row * names.length + 30, right = width - 14;
  const ends = intervalEnds(record, levels).concat(sampled ? intervalEnds(sampled, levels) : []);
  const scale = linear(extent(ends), [left + 8, right]);
  const svg = drawing(width, height, place.dataset.label);
  bottomAxis(svg, scale, [left, right], 0, height - 28, '');
  names.forEach((name, i) => {
    const y = row * (i + 0.5), mean = number(record.mean[i]), stddev = number(record.stddev[i]);
    const line = shape('g', choose ? { class: 'choose', click: () => choose(i) } : {});
    line.append(shape('rect', { x: 0, y: y - row / 2, width, height: row, rx: 5, class: i === chosen ? 'chosen' : '', ...(i === chosen ? {} : { fill: 'transparent' }) }));
    line.append(words(left, y + 4, fitted(name, left), 'end', i === chosen ? 'strong' : ''));
    const up = sampled ? -4 : 0;
    if (Number.isFinite(mean)) line.append(...bars(scale, y + up, mean, stddev, levels, 'var(--blue)', sampled ? 7 : 9));
    if (sampled && Number.isFinite(number(sampled.mean[i]))) {
      line.append(...bars(scale, y + 6, number(sampled.mean[i]), number(sampled.stddev[i]), levels, 'var(--orange)', 4));
    }
    svg.append(said(line, outputWords(names, record, levels, i)));
  });
  place.append(svg);
}

function bars(scale, y, mean, stddev, levels, fill, thick) {
  const [half, wide] = levels;
  const bar = (reach, height, opacity) => shape('rect', {
    x: scale(mean - reach * stddev), width: Math.max(1, scale(mean + reach * stddev) - scale(mean - reach * stddev)),
    y: y - height / 2, height, rx: height / 2, style: `fill: ${fill}; opacity: ${opacity}`,
  });
  return [bar(wide, 2, 1), bar(half, thick, 0.55), shape('circle', { cx: scale(mean), cy: y, r: thick / 2, style: `fill: ${fill}` })];
}

// Neighbours that have little to do with each other are easier to read in order of their means.
function isRough(mean) {
  const centre = mean.reduce((sum, value) => sum + value, 0) / mean.length;
  const spread = Math.sqrt(mean.reduce((sum, value) => sum + (value - centre) ** 2, 0) / mean.length);
  const steps = mean.slice(1).reduce((sum, value, i) => sum + Math.abs(value - mean[i]), 0) / (mean.length - 1);
  return steps > 0.5 * spread;
}

function drawBand(place, allNames, whole, levels, chosenOutput, chooseOutput) {
  const sorted = state.sorted ?? isRough(whole.mean.map(number));
  const order = allNames.map((_, i) => i);
  if (sorted) order.sort((i, j) => number(whole.mean[i]) - number(whole.mean[j]));
  const taken = values => order.map(i => values[i]);
  const names = taken(allNames), chosen = order.indexOf(chosenOutput);
  const record = { mean: taken(whole.mean), stddev: taken(whole.stddev) };
  if (whole.sampled) record.sampled = { mean: taken(whole.sampled.mean), stddev: taken(whole.sampled.stddev) };
  const choose = chooseOutput && (i => chooseOutput(order[i]));
  const box = node('input', { type: 'checkbox', change: event => { state.sorted = event.target.checked; draw([place.dataset.chart]); } });
  box.checked = sorted;
  place.append(node('label', { class: 'pick' }, box, 'sorted by mean'));
  const width = place.clientWidth, height = 300, left = 52, right = width - 12, bottom = height - 36, top = 10;
  const count = names.length;
  const x = linear([0, count - 1], [left, right]);
  const y = linear(extent(intervalEnds(record, levels)), [bottom, top]);
  const svg = drawing(width, height, place.dataset.label);
  leftAxis(svg, y, top, bottom, left, right, '', 6);
  const mean = record.mean.map(number), stddev = record.stddev.map(number);
  const area = reach => {
    const ends = sign => mean.map((value, i) => [x(i), y(value + sign * reach * stddev[i])]).filter(point => point.every(Number.isFinite));
    return [...ends(1), ...ends(-1).reverse()].map(point => point.map(at => at.toFixed(1)).join(',')).join(' ');
  };
  svg.append(shape('polygon', { points: area(levels[1]), style: 'fill: var(--blue); opacity: .22' }));
  svg.append(shape('polygon', { points: area(levels[0]), style: 'fill: var(--blue); opacity: .4' }));
  svg.append(curve(mean.map((value, i) => [x(i), y(value)]), 'var(--blue)'));
  if (record.sampled) svg.append(curve(record.sampled.mean.map((value, i) => [x(i), y(number(value))]), 'var(--orange)', '2 3'));
  if (chosen >= 0) svg.append(shape('line', { x1: x(chosen), x2: x(chosen), y1: top, y2: bottom, style: 'stroke: var(--ink); stroke-width: 1.5' }));
  if (sorted) svg.append(words(left, bottom + 18, `${count} of them, from the smallest mean to the largest`));
  else for (const i of ticks(0, count - 1, 5).filter(Number.isInteger)) svg.append(words(x(i), bottom + 18, fitted(names[i], 90), i === 0 ? 'start' : 'middle'));
  const nearest = event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * width / box.width;
    return Math.max(0, Math.min(count - 1, Math.round((at - left) / (right - left) * (count - 1))));
  };
  const cover = shape('rect', { x: left, y: top, width: right - left, height: bottom - top, fill: 'transparent', class: 'choose' });
  cover.addEventListener('pointermove', event => tip.show(outputWords(names, record, levels, nearest(event)), event.clientX, event.clientY));
  cover.addEventListener('pointerleave', tip.hide);
  if (choose) cover.addEventListener('click', event => choose(nearest(event)));
  svg.append(cover);
  place.append(svg);
}

function curve(points, stroke, dashes = '') {
  const path = points.map((point, i) => (Number.isFinite(point[1]) ? (i && Number.isFinite(points[i - 1][1]) ? 'L' : 'M') + point.map(at => at.toFixed(1)).join(' ') : '')).join('');
  return shape('path', { d: path || 'M0 0', style: `fill: none; stroke: ${stroke}; stroke-width: 1.8; stroke-dasharray: ${dashes || 'none'}` });
}

const charts = {
  intervals(place, { outputs }) {
    drawIntervals(place, outputs.names, element(outputs), data.levels, state.output, i => choose('output', i));
  },

  density(place, { outputs, maps }) {
    const record = element(outputs), i = state.output, levels = data.levels;
    const mean = number(record.mean[i]), stddev = number(record.stddev[i]);
    const panel = node('div', { class: 'panel' }, node('h3', {}, outputs.names[i]));
    place.append(panel);
    if (stddev > 0) panel.append(density(panel.clientWidth - 32, mean, stddev, levels, record.sampled, i, place.dataset.label));
    else panel.append(node('p', {}, Number.isFinite(mean) ? `It does not vary: ${short(mean, 5)}.` : 'Its mean or variance is not known.'));
    const end = reach => `${short(mean - reach * stddev, 4)} to ${short(mean + reach * stddev, 4)}`;
    const rows = [['mean', short(mean, 5)], ['standard deviation', short(stddev, 4)], ['half of all values', end(levels[0])], ['95 % of them', end(levels[1])]];
    if (record.sampled) {
      const { mean: means, stddev: deviations, mean_stderr: errors, stddev_stderr: spreads } = record.sampled;
      rows.push(['sampled mean', `${short(means[i], 5)} ± ${short(errors[i], 2)}`]);
      rows.push(['sampled deviation', `${short(deviations[i], 4)} ± ${short(spreads[i], 2)}`]);
    }
    if (maps) {
      const near = element(maps);
      const partners = near.partners[i].map((j, k) => `${outputs.names[j]} (${short(near.partner_correlations[i][k], 2)})`);
      rows.push(['varies most with', partners.join(', ')]);
    }
    panel.append(definitions(rows));
  },

  correlation(place, { outputs, maps }) { drawMatrix(place, outputs, maps, 'correlation', 1); },
  covariance(place, { outputs, maps }) { drawMatrix(place, outputs, maps, 'covariance'); },

  'outputs-mean'(place, { outputs }) { pictureMap(place, element(outputs).mean_picture, GREYS); },
  'outputs-stddev'(place, { outputs }) { pictureMap(place, element(outputs).stddev_picture); },
  'inputs-mean'(place, { inputs }) { pictureMap(place, element(inputs).mean_picture, GREYS); },
  'inputs-stddev'(place, { inputs }) { pictureMap(place, element(inputs).stddev_picture); },
  'inputs-intervals'(place, { inputs }) { drawIntervals(place, inputs.names, element(inputs), data.levels, -1, null); },
};

function drawMatrix(place, outputs, maps, kind, limit) {
  const record = element(maps), rows = record.rows, block = maps.block;
  const name = place_ => block === 1 ? outputs.names[place_]
    : `${outputs.names[place_ * block]} to ${outputs.names[Math.min(outputs.names.length, (place_ + 1) * block) - 1]}`;
  heatmap(place, {
    rows, columns: rows, values: symmetric(record[kind], rows), centred: true, limit, label: place.dataset.label,
    read: (row, column, value) => `${name(row)}\n${name(column)}\n${kind} ${short(value, 4)}`,
    choose: row => choose('output', Math.min(outputs.names.length - 1, row * block)),
    names: rows <= NAMED ? withoutCommon(outputs.names).map(name_ => fitted(name_, 60)) : null,
    side: rows > 4 ? 56 : 90,
  });
}

// Names without the words that all of them begin with.
function withoutCommon(names) {
  const first = names[0].split(' ');
  let count = 0;
  while (count < first.length - 1 && names.every(name_ => name_.split(' ').length > count + 1 && name_.split(' ')[count] === first[count])) count++;
  return names.map(name_ => name_.split(' ').slice(count).join(' '));
}

function density(width, mean, stddev, levels, sampled, i, label) {
  const height = 150, bottom = height - 24, top = 8;
  const others = sampled && number(sampled.stddev[i]) > 0 ? [number(sampled.mean[i]), number(sampled.stddev[i])] : null;
  const curves = [[mean, stddev], ...(others ? [others] : [])];
  const ends = curves.flatMap(([centre, width_]) => [centre - 3.5 * width_, centre + 3.5 * width_]);
  const range = [Math.min(...ends), Math.max(...ends)];
  const x = linear(range, [4, width - 4]);
  const peak = Math.max(...curves.map(([, deviation]) => 1 / deviation));
  const y = linear([0, peak], [bottom, top]);
  const svg = drawing(width, height, label);
  const at = (centre, deviation) => value => Math.exp(-0.5 * ((value - centre) / deviation) ** 2) / deviation;
  const between = (low, high) => Array.from({ length: 121 }, (_, k) => low + k / 120 * (high - low));
  const area = (reach, opacity) => {
    const places = between(mean - reach * stddev, mean + reach * stddev), height_ = at(mean, stddev);
    const points = places.map(value => [x(value), y(height_(value))]);
    const corners = [[x(places[0]), bottom], ...points, [x(places[120]), bottom]];
    return shape('polygon', { points: corners.map(point => point.map(v => v.toFixed(1)).join(',')).join(' '), style: `fill: var(--blue); opacity: ${opacity}` });
  };
  bottomAxis(svg, x, [4, width - 4], bottom, bottom, '', 4);
  svg.append(area(levels[1], 0.22), area(levels[0], 0.35));
  const line = ([centre, deviation], stroke, dashes) => curve(between(...range).map(value => [x(value), y(at(centre, deviation)(value))]), stroke, dashes);
  svg.append(line([mean, stddev], 'var(--blue)'));
  if (others) svg.append(line(others, 'var(--orange)', '5 4'));
  svg.append(shape('line', { x1: 4, x2: width - 4, y1: bottom, y2: bottom, class: 'zero' }));
  return svg;
}
