// The words beside the pointer.
import { byId, element } from "./elements.js";

const ROOM = 16; // between the pointer and the words
const EDGE = 4; // between the words and the edge of the window

/**
 * Where words begin along one side of the window: after the pointer, or before it where there is no room.
 * @param {number} pointer
 * @param {number} size of the words
 * @param {number} most size of the window
 */
export function placed(pointer, size, most) {
  const after = pointer + ROOM;
  return Math.max(EDGE, after + size > most ? pointer - ROOM - size : after);
}

/**
 * A name, and facts about it by their labels, beside a point of the window.
 * @param {string} name
 * @param {Record<string, string>} facts
 * @param {{ clientX: number, clientY: number }} point
 */
export function showTip(name, facts, point) {
  const tip = byId("tip");
  const lines = Object.entries(facts).map(([label, text]) =>
    element("span", {}, element("i", {}, label), text),
  );
  tip.replaceChildren(element("b", {}, name), ...lines);
  tip.hidden = false;
  moveTip(point);
}

/**
 * @param {{ clientX: number, clientY: number }} point
 */
export function moveTip(point) {
  const tip = byId("tip");
  const { width, height } = tip.getBoundingClientRect();
  const left = placed(point.clientX, width, innerWidth);
  tip.style.transform = `translate(${left}px, ${placed(point.clientY, height, innerHeight)}px)`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
