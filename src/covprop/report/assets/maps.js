// Maps of values: a canvas of one pixel for each cell, its scale, and a line that reads a cell out.
// Diverging from blue to orange and sequential from dark blue to yellow: both distinguishable for those who see fewer colours.
const DIVERGING = {
  light: [[8, 64, 129], [67, 147, 195], [247, 247, 247], [230, 130, 40], [140, 52, 4]],
  dark: [[140, 205, 250], [50, 120, 175], [28, 34, 41], [200, 105, 30], [255, 190, 125]],
};
const SEQUENTIAL = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
const GREYS = [[16, 18, 20], [250, 250, 250]];

function colour(stops, share) {
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const first = Math.min(stops.length - 2, Math.floor(place)), rest = place - first;
  return stops[first].map((part, i) => Math.round(part + rest * (stops[first + 1][i] - part)));
}

// rows x columns of values; centred: zero is in the middle of the colours; read(row, column, value): what a cell says;
// names: of the rows and columns; side: pixels of a cell at most.
function heatmap(parent, { rows, columns, values, centred = false, stops, limit, label, read, choose, names, side = 40 }) {
  const known = values.filter(Number.isFinite);
  let low = known.length ? Math.min(...known) : 0, high = known.length ? Math.max(...known) : 1;
  if (centred) { high = limit || Math.max(Math.abs(low), Math.abs(high)) || 1; low = -high; }
  const palette = stops || (centred ? DIVERGING[isDark() ? 'dark' : 'light'] : SEQUENTIAL);
  const paint = value => Number.isFinite(value) ? colour(palette, high > low ? (value - low) / (high - low) : 0.5) : [128, 128, 128];
  const width = Math.min(parent.clientWidth - 100, 480, side * columns);
  const canvas = painted(rows, columns, values.map(paint), label);
  const cells = node('div', { class: 'cells' }, canvas);
  const box = node('div', { class: 'map', style: `max-width: ${width + 140}px` }, node('div'), cells, scale(palette, low, high));
  if (names) {
    box.firstChild.replaceWith(node('div', { class: 'side', style: `grid-template-rows: repeat(${rows}, 1fr)`, 'aria-hidden': 'true' }, ...names.map(name => node('span', {}, name))));
    box.append(node('div', { class: 'foot', style: `grid-template-columns: repeat(${columns}, 1fr)`, 'aria-hidden': 'true' }, ...names.map(name => node('span', {}, name))));
    const space = width / columns;
    if (space >= 23) {
      const text = written(columns, values, paint, Math.max(...known.map(Math.abs)));
      text.style.fontSize = `${Math.min(12, space / 3.2)}px`;
      cells.append(text);
    }
  }
  const readout = node('p', { class: 'readout', 'aria-live': 'polite' });
  parent.append(box, readout);
  pointed(canvas, rows, columns, (row, column) => read(row, column, values[row * columns + column]), readout, choose);
}

function painted(rows, columns, colours, label) {
  const canvas = node('canvas', { width: columns, height: rows, tabindex: 0, role: 'img', 'aria-label': label });
  const picture = canvas.getContext('2d');
  const pixels = picture.createImageData(columns, rows);
  colours.forEach((parts, i) => pixels.data.set([...parts, 255], 4 * i));
  picture.putImageData(pixels, 0, 0);
  canvas.style.aspectRatio = `${columns} / ${rows}`;
  return canvas;
}

// Values in the cells to two digits of the largest, dark on light colours and light on dark ones.
function written(columns, values, paint, largest) {
  const unit = 10 ** (Math.floor(Math.log10(largest)) - 2);
  const cell = value => {
    const [red, green, blue] = paint(value);
    const ink = 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? '#14181d' : '#ffffff';
    return node('span', { style: `color: ${ink}` }, Number.isFinite(value) ? short(Math.round(value / unit) * unit || 0, 2) : '');
  };
  return node('div', { class: 'grid', style: `grid-template-columns: repeat(${columns}, 1fr)`, 'aria-hidden': 'true' }, ...values.map(cell));
}

function scale(palette, low, high) {
  const stripes = palette.map(stop => `rgb(${stop.join(',')})`).join(', ');
  return node('div', { class: 'scale', 'aria-hidden': 'true' },
    node('i', { style: `background: linear-gradient(to top, ${stripes})` }),
    node('span', {}, ...[high, (high + low) / 2, low].map(value => node('b', { style: 'font-weight: 400' }, short(value, 2)))));
}

// A cell is read by pointing at it, or by the arrow keys; Enter and a click choose it.
function pointed(canvas, rows, columns, tell, readout, choose) {
  const cell = { row: 0, column: 0 };
  const within = (value, count) => Math.min(count - 1, Math.max(0, value));
  const point = event => {
    const box = canvas.getBoundingClientRect();
    cell.column = within(Math.floor((event.clientX - box.left) / box.width * columns), columns);
    cell.row = within(Math.floor((event.clientY - box.top) / box.height * rows), rows);
  };
  const record = () => tell(cell.row, cell.column);
  canvas.addEventListener('pointermove', event => { point(event); tip.show(record(), event.clientX, event.clientY); });
  canvas.addEventListener('pointerleave', tip.hide);
  canvas.addEventListener('focus', () => { readout.textContent = record().replaceAll('\n', ' · '); });
  if (choose) canvas.addEventListener('click', event => { point(event); choose(cell.row); });
  canvas.addEventListener('keydown', event => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === 'Enter' && choose) choose(cell.row);
    if (!step) return;
    cell.row = within(cell.row + step[0], rows);
    cell.column = within(cell.column + step[1], columns);
    event.preventDefault();
    readout.textContent = record().replaceAll('\n', ' · ');
  });
}

// The upper triangle of a symmetric matrix, row after row, as all of it.
function symmetric(triangle, rows) {
  const values = new Array(rows * rows);
  let next = 0;
  for (let i = 0; i < rows; i++) {
    for (let j = i; j < rows; j++) values[i * rows + j] = values[j * rows + i] = number(triangle[next++]);
  }
  return values;
}

function pictureMap(place, { rows, columns, values }, stops, side = 240) {
  const known = values.map(number);
  if (known.length && known.every(value => value === known[0])) {
    place.append(node('div', { class: 'panel' }, `${short(known[0], 4)} everywhere`));
    return;
  }
  heatmap(place, {
    rows, columns, values: known, stops, side: side / Math.max(rows, columns), label: place.dataset.label || 'Picture of the chosen step',
    read: (row, column, value) => `row ${row}, column ${column}\n${short(value, 4)}`,
  });
}
