// Where a cache of keys or values that is a line of texels (gpu/texels.rs) has its granules of 16 bytes.

const LINE_TEXELS: u32 = 1024u;

fn texel_of(granule: u32) -> vec2<u32> {
  return vec2(granule % LINE_TEXELS, granule / LINE_TEXELS);
}
