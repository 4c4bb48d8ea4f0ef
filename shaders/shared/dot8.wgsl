/// The dot product of 16 elements, a signed byte each.
fn dot_bytes(w: vec4<u32>, x: vec4<u32>) -> i32 {
  return dot4I8Packed(w.x, x.x) + dot4I8Packed(w.y, x.y) + dot4I8Packed(w.z, x.z) + dot4I8Packed(w.w, x.w);
}
