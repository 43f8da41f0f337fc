import { empty, h } from "./dom.js";
export async function showChat(place) { place.append(h("h1", {}, "Chat"), empty("")); }
