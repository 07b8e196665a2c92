// Drawing: elements, axes, keys and the box that follows the pointer. Text is set as text, never as HTML.
const SVG = document.querySelector('svg').namespaceURI; // not written out: the page names no address

function node(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  return filled(element, attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'style') element.style.cssText = value;
    else if (typeof value === 'function') element.addEventListener(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

// null is a number that is not known, a word an infinite one.
function number(value) {
  if (value === null || value === undefined) return NaN;
  return typeof value === 'string' ? Number(value.replace('inf', 'Infinity')) : value;
}

function short(value, digits = 3) {
  const known = number(value);
  if (Number.isNaN(known)) return 'not known';
  if (!Number.isFinite(known)) return known > 0 ? '∞' : '−∞';
  const size = Math.abs(known);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5)
    ? known.toExponential(digits - 1).replace(/\.?0*e\+?/, 'e')
    : String(Number(known.toPrecision(digits)));
  return text.replace(/^-/, '−').replace('e-', 'e−');
}

function percent(share, digits = 2) { return short(100 * number(share), digits) + ' %'; }

// A share to read at a glance; what is below a hundredth of a percent hardly is.
function atAGlance(share) { return number(share) > 0 && number(share) < 1e-4 ? '< 0.01 %' : percent(share, 3); }

// An error is left out where it says nothing.
function withError(share, error) {
  return percent(share, 3) + (number(error) > 1e-3 * number(share) ? ` ± ${percent(error, 1)}` : '');
}

// Round places on an axis, about `count` of them.
function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map(times => times * power).find(size => span / size <= count) || 10 * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(i * step);
  return found;
}

function powers(low, high) {
  const found = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 5));
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  return found.filter(value => value >= low * 0.999 && value <= high * 1.001);
}

function linear([low, high], [start, end]) {
  const span = high - low || 1;
  const scale = value => start + (value - low) / span * (end - start);
  scale.ticks = count => ticks(low, high, count);
  return scale;
}

function logarithmic([low, high], [start, end]) {
  const scale = value => start + Math.log(value / low) / Math.log(high / low) * (end - start);
  scale.ticks = () => {
    const found = powers(low, high);
    return found.length > 1 ? found : [low, Math.sqrt(low * high), high];
  };
  return scale;
}

// Ends of an axis with some space beyond what it holds.
function extent(values, space = 0.05) {
  const known = values.filter(Number.isFinite);
  if (!known.length) return [0, 1];
  const low = Math.min(...known), high = Math.max(...known);
  const more = high > low ? space * (high - low) : Math.abs(low) * 0.1 || 1;
  return [low - more, high + more];
}

function logarithmicExtent(values) {
  const known = values.filter(value => Number.isFinite(value) && value > 0);
  if (!known.length) return [0.1, 10];
  const low = Math.min(...known), high = Math.max(...known);
  return [low / 1.5, high * 1.5];
}

function drawing(width, height, label) {
  return shape('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label });
}

function words(x, y, text, anchor = 'start', kind = '') {
  return shape('text', { x, y, 'text-anchor': anchor, class: kind }, text);
}

// Names that are too long for their place end in dots; the whole name is in the box.
function fitted(text, space) {
  const letters = Math.max(3, Math.floor(space / 6.6));
  return text.length > letters ? text.slice(0, letters - 1) + '…' : text;
}

function bottomAxis(svg, scale, [left, right], top, bottom, title, count = 6) {
  let free = -Infinity; // where the next number has space
  for (const value of scale.ticks(count)) {
    const at = scale(value), text = short(value), half = 3.5 * text.length;
    if (at < left - 1 || at > right + 1) continue;
    svg.append(shape('line', { x1: at, x2: at, y1: top, y2: bottom, class: 'tick' }));
    if (at - half < free) continue;
    svg.append(words(at, bottom + 16, text, 'middle'));
    free = at + half + 4;
  }
  if (title) svg.append(words((left + right) / 2, bottom + 34, title, 'middle'));
}

function leftAxis(svg, scale, top, bottom, left, right, title, count = 4) {
  for (const value of scale.ticks(count)) {
    const at = scale(value);
    if (at < top - 1 || at > bottom + 1) continue;
    svg.append(shape('line', { x1: left, x2: right, y1: at, y2: at, class: 'tick' }));
    svg.append(words(left - 6, at + 4, short(value), 'end'));
  }
  if (title) svg.append(words(0, top - 8, title));
}

function key(...items) {
  return node('ul', { class: 'key' }, ...items.map(([colour, text]) =>
    node('li', {}, node('i', { style: `background: ${colour}` }), text)));
}

function definitions(rows) {
  const list = node('dl');
  for (const [name, value] of rows) {
    if (value !== '' && value !== null && value !== undefined) list.append(node('dt', {}, name), node('dd', {}, value));
  }
  return list;
}

const tip = {
  show(text, x, y) {
    const box = document.getElementById('tip');
    box.textContent = text;
    box.hidden = false;
    const wide = box.offsetWidth, high = box.offsetHeight;
    box.style.left = Math.max(4, Math.min(x + 14, innerWidth - wide - 8)) + 'px';
    box.style.top = (y + high + 24 > innerHeight ? Math.max(4, y - high - 10) : y + 16) + 'px';
  },
  hide() { document.getElementById('tip').hidden = true; },
};

function said(element, text) {
  element.setAttribute('data-tip', text);
  return element;
}
