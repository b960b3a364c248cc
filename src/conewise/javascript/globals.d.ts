// What pages have beside their own modules.

interface Window {
  /** What the script of cones and waves gives to the page around it. */
  conewise?: { showCone: (name: string) => void };
}

interface Uint8ArrayConstructor {
  /** Not in all browsers yet. */
  fromBase64?(text: string): Uint8Array<ArrayBuffer>;
}

/** plotly.js, which stands in the head of pages that draw with it; what of it is used. */
declare namespace Plotly {
  type Figure = HTMLElement | string;
  type Values = Record<string, unknown>;
  interface Point {
    x: number;
    y: number;
  }
  interface PointEvent {
    points: Point[];
    event: MouseEvent;
  }
  interface Plotted extends HTMLElement {
    on(name: "plotly_hover" | "plotly_click", act: (event: PointEvent) => void): void;
    on(name: "plotly_unhover", act: () => void): void;
  }
  function newPlot(figure: Figure, data: Values[], layout: Values, config?: Values): Promise<Plotted>;
  function react(figure: Figure, data: Values[], layout: Values, config?: Values): Promise<Plotted>;
  function relayout(figure: Figure, change: Values): Promise<Plotted>;
}
