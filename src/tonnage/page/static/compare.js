import { empty, h } from "./dom.js";
export async function showCompare(place) { place.append(h("h1", {}, "Compare"), empty("")); }
