// The bindings of packed weights, for kernels that import weights.wgsl. kernels/pack.rs describes the planes.
#ifdef TEXELS
@group(0) @binding(3) var wq: texture_storage_2d<rgba32uint, read>;
#ifdef FIFTHS
@group(0) @binding(4) var wh: texture_storage_2d<r32uint, read>;
#endif
#ifdef SIXTHS
@group(0) @binding(4) var wh: texture_storage_2d<rg32uint, read>;
#endif
#ifdef QUANTISED
#ifdef SCALE_HALF
@group(0) @binding(5) var ws: texture_storage_2d<rg32uint, read>;
#else
@group(0) @binding(5) var ws: texture_storage_2d<rgba32uint, read>;
#endif
#endif
#else
@group(0) @binding(3) var<storage, read> wq: array<Granule>; // [n / 64, granules, 64]
#ifdef HAS_HIGH
@group(0) @binding(4) var<storage, read> wh: array<HighBits>; // [n / 64, groups, 64]
#endif
#ifdef QUANTISED
@group(0) @binding(5) var<storage, read> ws: array<Scales>; // [n / 64, quads, 64, ..]
#endif
#endif
