/* The few things that are needed of a framework. Text is always set as text. */

export const $ = (id) => document.getElementById(id);

/** An element: properties as they are, `class`, and `aria-*` and `data-*` as attributes; children are nodes or text. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("aria-") || name.startsWith("data-") || name === "scope")
      element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set text only where it differs: what has not changed is not read out again, and a selection stays. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** Show these children in `parent`, unless it shows the same already. */
export function show(parent, ...children) {
  const fresh = h("div", {}, ...children);
  fresh.normalize();
  const same =
    parent.childNodes.length === fresh.childNodes.length &&
    [...parent.childNodes].every((node, index) => node.isEqualNode(fresh.childNodes[index]));
  if (!same) parent.replaceChildren(...fresh.childNodes);
}

/**
 * One child of `parent` for each item, in order. An item keeps its element, so that a focused button stays focused
 * while the rows move around it. `make(item)` builds an element, `fill(element, item, index)` brings it up to date.
 */
export function keyed(parent, items, key, make, fill) {
  const names = items.map(key);
  const kept = new Set(names);
  const there = new Map();
  for (const child of [...parent.children]) {
    if (kept.has(child.dataset.key)) there.set(child.dataset.key, child);
    else remove(child);
  }
  let place = parent.firstElementChild;
  items.forEach((item, index) => {
    const element = there.get(names[index]) ?? make(item);
    element.dataset.key = names[index];
    fill(element, item, index);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  });
}

/** The focus of a row that goes stays nearby instead of falling to the top of the page. */
function remove(element) {
  const near = element.contains(document.activeElement) ? element.closest("section") : null;
  element.remove();
  if (near !== null) {
    near.tabIndex = -1;
    near.focus({ preventScroll: true });
  }
}
