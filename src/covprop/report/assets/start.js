// What is chosen, the controls that choose it, and when the page is drawn again.
const data = JSON.parse(document.getElementById('data').textContent);
const root = document.documentElement;
const state = { batch: 0, output: 0, step: data.layers ? data.layers.start : 0, sorted: null, printing: false };

function isDark() {
  if (state.printing) return false;
  return root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

// The charts that show what changed.
const SHOWING = { step: ['steps', 'step'], output: ['intervals', 'density'] };

function choose(name, value) {
  state[name] = value;
  for (const control of document.querySelectorAll(`select[data-choice="${name}"]`)) control.value = value;
  draw(SHOWING[name]);
}

function picker(name, options) {
  const select = node('select', { 'data-choice': name, 'aria-label': `Choose the ${name === 'batch' ? 'input' : name}`, change: event => choose(name, Number(event.target.value)) },
    ...options.map((text, i) => node('option', { value: i }, text)));
  select.value = state[name];
  return select;
}

function draw(names = Object.keys(charts)) {
  for (const name of names) {
    for (const place of document.querySelectorAll(`[data-chart="${name}"]`)) {
      const active = document.activeElement;
      const kept = active && place.contains(active) ? active.tagName : null;
      const high = place.offsetHeight;
      place.style.minHeight = `${high}px`; // so that the page does not jump while it is empty
      place.replaceChildren();
      charts[name](place, data);
      place.style.minHeight = '';
      if (kept) place.querySelector(kept)?.focus({ preventScroll: true });
    }
  }
}

function controls() {
  const place = document.getElementById('controls');
  if (data.batch.length) place.append(node('label', {}, 'Input', picker('batch', data.batch)));
  if (data.outputs && data.outputs.names.length > 1) place.append(node('label', {}, 'Output', picker('output', data.outputs.names)));
  const theme = node('button', { type: 'button', id: 'theme' });
  const show = () => {
    theme.textContent = isDark() ? '☀ Light' : '☾ Dark';
    theme.setAttribute('aria-label', isDark() ? 'Use light colours' : 'Use dark colours');
  };
  theme.addEventListener('click', () => { root.dataset.theme = isDark() ? 'light' : 'dark'; show(); draw(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { show(); draw(); });
  show();
  place.append(theme);
}

function follow() {
  document.addEventListener('pointermove', event => {
    const shown = event.target.closest?.('[data-tip]');
    if (shown) tip.show(shown.dataset.tip, event.clientX, event.clientY);
    else if (event.target.tagName !== 'CANVAS' && !event.target.closest?.('.choose')) tip.hide();
  });
  document.addEventListener('keydown', event => { if (event.key === 'Escape') tip.hide(); });
  document.addEventListener('scroll', tip.hide, { passive: true });
  let width = document.body.clientWidth, waiting = 0;
  addEventListener('resize', () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); } }, 120);
  });
}

// On paper all tables are open and maps have light colours.
function paper() {
  const folded = [];
  addEventListener('beforeprint', () => {
    state.printing = true;
    const shown = data.batch.length ? `Charts show ${data.batch[state.batch]}.` : '';
    document.querySelector('.showing').textContent = shown;
    root.classList.add('paper');
    for (const part of document.querySelectorAll('details:not([open])')) { part.open = true; folded.push(part); }
    draw();
  });
  addEventListener('afterprint', () => {
    state.printing = false;
    root.classList.remove('paper');
    for (const part of folded.splice(0)) part.open = false;
    draw();
  });
}

if (data.decision) state.batch = Math.max(0, data.decision.risks.shown[0]); // the riskiest
if (data.outputs) { // the most uncertain one first
  const widths = element(data.outputs).stddev.map(value => number(value) || 0);
  state.output = widths.indexOf(Math.max(...widths));
}
controls();
follow();
paper();
draw();
root.classList.add('drawn');
