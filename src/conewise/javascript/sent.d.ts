// What pages send to their scripts; `python -m tests.javascript.sent_types` writes it, from Python's.

export interface SentFixed {
  fixed: number;
}

export interface SentAlong {
  axis: number;
}

export interface SentListed {
  list: string;
}

export interface SentPart {
  name: string;
  axes: string[];
  coordinates: number[][];
  labels: string[][] | null;
  start: number;
  count: number;
  pieces: (string | number)[] | null;
  names: string[] | null;
  kind: string | null;
  kinds: string[] | null;
  at: Record<string, SentFixed | SentAlong | SentListed>;
}

export interface SentCosts {
  runs: [number, number][];
  evaluations: number[];
  flops: number[];
  full: [number, number];
}

export interface SentColours {
  light: [number, number, number][];
  dark: [number, number, number][];
}

export interface SentSweep {
  metrics: string[];
  table: string;
  base: string;
  source: string | null;
  prompts: number;
  unit: string;
  perPrompt: string | null;
  basePerPrompt: string | null;
  sourcePerPrompt: string | null;
  parts: SentPart[];
  tokens: string[];
  costs: SentCosts | null;
  colours: SentColours;
}

export interface SentPattern {
  layer: number;
  head: number;
  effect: number;
  prompt: number;
  weights: number[][];
}

export interface SentInside {
  tokens: string[][];
  patterns: SentPattern[];
}

export interface SentEdge {
  name: string;
  from: number;
  to: number;
  slot: string;
  curve: [number, number][];
  score: number | null;
  level: number;
  own: boolean;
}

export interface SentOwn {
  edges: number;
  faithfulness: number | null;
}

export interface SentCircuit {
  columns: number;
  rows: number;
  boxes: [string, string, number | null, number, number][];
  links: [number, number][];
  edges: SentEdge[];
  points: [number, number, number | null][];
  own: SentOwn;
}

export interface SentCone {
  names: string[];
  sites: string[];
  at: number[];
  from: number;
  but: [number, number, number][];
  lost: [number, number][];
  reused: [number, number][];
}

export interface SentFolded {
  kind: "conewise folded";
  format: number;
  model: string;
  parts: [string, string, string, string, number, number, number | null, string][];
  edges: [number, number, number][];
  cones: SentCone[];
  runs: [number, number][];
  demanded: string[];
  full_evaluations: number;
  full_flops: number;
}

export interface SentWave {
  site: number;
  after: Record<number, string>;
  restored: number;
  invalidated: number[];
  planned: number[];
  recomputed: number[];
  reused: number[];
}

export interface SentWaves {
  kind: "conewise waves";
  nodes: [string, boolean][];
  targets: number[];
  full: number;
  before: Record<number, string>;
  waves: SentWave[];
}
