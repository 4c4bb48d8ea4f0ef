//! Memory that kernels read as texels of a read-only storage texture instead of elements of a storage buffer.
//!
//! Software drivers load from a buffer lane by lane, each with a branch and a bounds check; a texel of 16 bytes is one
//! load and a share of a transpose there, four times as fast. Elsewhere nothing is gained.
//!
//! Two kinds. *Planes* are rectangles that are uploaded once. *Lines* ([`Gpu::alloc_line`]) stand for a buffer: sliced,
//! copied, written and read back by ranges of bytes, and written by kernels, too.
//!
//! Guarantees: texels hold the bytes that were written, whatever their format is called. Not attempted: clearing lines;
//! copies between two of them.

use super::buffer::{Buffer, UPLOAD_IN_FLIGHT, Uploader};
use super::device::Gpu;
use super::error::GpuError;

/// Largest width and height that every adapter has.
pub const MAX_EXTENT: u32 = 8192;

/// Texels of a row of a line.
pub const LINE_TEXELS: u32 = 1024;
const TEXEL_BYTES: u64 = 16;
const LINE_BYTES: u32 = LINE_TEXELS * TEXEL_BYTES as u32;
/// What a line can hold.
pub const MAX_LINE_BYTES: u64 = MAX_EXTENT as u64 * LINE_BYTES as u64;

/// Subgroups of software drivers have at most this many lanes.
pub const TEXEL_LANES: u32 = 16;

/// A texture that is bound as a whole.
pub(super) struct Texels {
    texture: wgpu::Texture,
    pub(super) view: wgpu::TextureView,
    texel_bytes: u32,
    pub(super) is_line: bool,
}

/// Texels of a line that lie in a rectangle, and the first of their bytes, counted from the range's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rectangle {
    first_byte: u64,
    origin: [u32; 2],
    extent: [u32; 2],
}

/// A line's range of bytes: at most a part of a row, whole rows, and a part of a row.
fn rectangles(offset: u64, size: u64) -> Vec<Rectangle> {
    assert!(
        offset.is_multiple_of(TEXEL_BYTES) && size.is_multiple_of(TEXEL_BYTES),
        "{offset}+{size} is not whole texels"
    );
    let (first, end, row) = (offset / TEXEL_BYTES, (offset + size) / TEXEL_BYTES, u64::from(LINE_TEXELS));
    let mut found = Vec::new();
    let mut at = first;
    while at < end {
        let x = at % row;
        let rows = if x == 0 { (end - at) / row } else { 0 };
        let extent = if rows > 0 { [row, rows] } else { [(row - x).min(end - at), 1] };
        found.push(Rectangle {
            first_byte: (at - first) * TEXEL_BYTES,
            origin: [x as u32, (at / row) as u32],
            extent: extent.map(|n| n as u32),
        });
        at += extent[0] * extent[1];
    }
    found
}

impl Rectangle {
    fn extent(&self) -> wgpu::Extent3d {
        wgpu::Extent3d { width: self.extent[0], height: self.extent[1], depth_or_array_layers: 1 }
    }

    fn place<'t>(&self, texture: &'t wgpu::Texture) -> wgpu::TexelCopyTextureInfo<'t> {
        let origin = wgpu::Origin3d { x: self.origin[0], y: self.origin[1], z: 0 };
        wgpu::TexelCopyTextureInfo { origin, ..texture.as_image_copy() }
    }

    /// Where its bytes lie in a buffer that holds the range from `offset` on.
    fn layout(&self, offset: u64) -> wgpu::TexelCopyBufferLayout {
        wgpu::TexelCopyBufferLayout {
            offset: offset + self.first_byte,
            bytes_per_row: Some(LINE_BYTES),
            rows_per_image: None,
        }
    }
}

impl Texels {
    /// Writes a line's bytes from `offset` on before the next submit.
    pub(super) fn write_line(&self, gpu: &Gpu, offset: u64, bytes: &[u8]) {
        for part in rectangles(offset, bytes.len() as u64) {
            gpu.queue.write_texture(part.place(&self.texture), bytes, part.layout(0), part.extent());
        }
    }

    /// Copies a line's bytes `offset..offset + size` to `to_offset` of a buffer, a multiple of 16.
    pub(super) fn copy_line_out(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        (offset, size): (u64, u64),
        (to, to_offset): (&wgpu::Buffer, u64),
    ) {
        for part in rectangles(offset, size) {
            let to = wgpu::TexelCopyBufferInfo { buffer: to, layout: part.layout(to_offset) };
            encoder.copy_texture_to_buffer(part.place(&self.texture), to, part.extent());
        }
    }

    /// Copies `size` bytes of a buffer, from a multiple of 16 on, to `offset` of a line.
    pub(super) fn copy_line_in(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        (from, from_offset): (&wgpu::Buffer, u64),
        (offset, size): (u64, u64),
    ) {
        for part in rectangles(offset, size) {
            let from = wgpu::TexelCopyBufferInfo { buffer: from, layout: part.layout(from_offset) };
            encoder.copy_buffer_to_texture(from, part.place(&self.texture), part.extent());
        }
    }

    /// Whether a shader that declares this format can read it.
    pub(super) fn is_read_as(&self, format: wgpu::TextureFormat) -> bool {
        self.texture.format() == format
    }
}

/// The format of texels with so many bytes: 4, 8 or 16.
fn format_of(texel_bytes: u32) -> Option<wgpu::TextureFormat> {
    match texel_bytes {
        4 => Some(wgpu::TextureFormat::R32Uint),
        8 => Some(wgpu::TextureFormat::Rg32Uint),
        16 => Some(wgpu::TextureFormat::Rgba32Uint),
        _ => None,
    }
}

impl Gpu {
    /// Allocates `width` x `height` texels of 4, 8 or 16 bytes, bound as `texture_storage_2d<r32uint, read>`, `rg32uint` or
    /// `rgba32uint`.
    pub fn alloc_texels(&self, label: &str, (width, height): (u32, u32), texel_bytes: u32) -> Result<Buffer, GpuError> {
        let size = u64::from(width) * u64::from(height) * u64::from(texel_bytes);
        let texels = self.texture(label, (width, height), texel_bytes, wgpu::TextureUsages::empty())?;
        Ok(Buffer::of_texels(self, label, size, Texels { is_line: false, ..texels }))
    }

    /// Allocates a line of texels of 16 bytes, zeroed at first use: texel i lies at (i % [`LINE_TEXELS`], i / it). It is
    /// sliced, copied, written and read back as a buffer is, in multiples of 16 bytes, and bound whole as
    /// `texture_storage_2d<rgba32uint, read>` or `write`. At most [`MAX_LINE_BYTES`]; the last row is not counted in full.
    pub fn alloc_line(&self, label: &str, bytes: u64) -> Result<Buffer, GpuError> {
        let size = bytes.max(1).next_multiple_of(TEXEL_BYTES);
        let height = u32::try_from(size.div_ceil(u64::from(LINE_BYTES))).unwrap_or(u32::MAX);
        let texels = self.texture(label, (LINE_TEXELS, height), TEXEL_BYTES as u32, wgpu::TextureUsages::COPY_SRC)?;
        Ok(Buffer::of_texels(self, label, size, Texels { is_line: true, ..texels }))
    }

    fn texture(
        &self,
        label: &str,
        (width, height): (u32, u32),
        texel_bytes: u32,
        usage: wgpu::TextureUsages,
    ) -> Result<Texels, GpuError> {
        let fault = |message: String| GpuError::validation(label, message);
        let format = format_of(texel_bytes).ok_or_else(|| fault(format!("no texel has {texel_bytes} bytes")))?;
        if width.max(height) > MAX_EXTENT {
            return Err(fault(format!("{width} x {height} texels, more than {MAX_EXTENT} in a direction")));
        }
        let desc = wgpu::TextureDescriptor {
            label: Some(label),
            size: wgpu::Extent3d { width, height, depth_or_array_layers: 1 },
            mip_level_count: 1,
            sample_count: 1,
            dimension: wgpu::TextureDimension::D2,
            format,
            usage: wgpu::TextureUsages::STORAGE_BINDING | wgpu::TextureUsages::COPY_DST | usage,
            view_formats: &[],
        };
        let size = u64::from(width) * u64::from(height) * u64::from(texel_bytes);
        let texture = self.scoped(label, size, || self.device.create_texture(&desc))?;
        let view = texture.create_view(&wgpu::TextureViewDescriptor::default());
        Ok(Texels { texture, view, texel_bytes, is_line: false })
    }
}

impl Uploader<'_> {
    /// Writes a rectangle of texels, row after row, from texel (x, y) on.
    ///
    /// Panics when `to` is no memory of texels, or when the bytes are not those of the rectangle.
    pub fn write_texels(
        &mut self,
        to: &Buffer,
        (x, y): (u32, u32),
        (width, height): (u32, u32),
        bytes: &[u8],
    ) -> Result<(), GpuError> {
        let texels = to.texels().expect("memory that was allocated as texels");
        let bytes_per_row = width * texels.texel_bytes;
        assert_eq!(bytes.len() as u64, u64::from(bytes_per_row) * u64::from(height), "bytes of {to:?}");
        if self.pending > 0 && self.pending + bytes.len() > UPLOAD_IN_FLIGHT {
            self.flush()?;
        }
        let target =
            wgpu::TexelCopyTextureInfo { origin: wgpu::Origin3d { x, y, z: 0 }, ..texels.texture.as_image_copy() };
        let layout =
            wgpu::TexelCopyBufferLayout { offset: 0, bytes_per_row: Some(bytes_per_row), rows_per_image: Some(height) };
        let extent = wgpu::Extent3d { width, height, depth_or_array_layers: 1 };
        self.gpu.queue.write_texture(target, bytes, layout, extent);
        self.pending += bytes.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_line_are_covered_in_order_by_few_rectangles() {
        let row = u64::from(LINE_TEXELS);
        for (first, count) in [(0, 1), (0, row), (5, row), (row - 1, 2), (7, 3 * row), (row, 2 * row + 9), (3, 0)] {
            let found = rectangles(first * TEXEL_BYTES, count * TEXEL_BYTES);
            assert!(found.len() <= 3, "{found:?}");
            let mut next = first;
            for part in &found {
                assert_eq!(part.first_byte, (next - first) * TEXEL_BYTES);
                assert_eq!(u64::from(part.origin[1]) * row + u64::from(part.origin[0]), next);
                assert!(part.extent[1] == 1 || part.extent[0] == LINE_TEXELS, "rows that are not whole: {part:?}");
                assert!(part.origin[0] + part.extent[0] <= LINE_TEXELS);
                next += u64::from(part.extent[0]) * u64::from(part.extent[1]);
            }
            assert_eq!(next, first + count);
        }
    }

    #[test]
    fn shaders_know_how_long_a_row_is() {
        let text = include_str!("../../shaders/shared/kv_texels.wgsl");
        assert!(text.contains(&format!("LINE_TEXELS: u32 = {LINE_TEXELS}u;")));
    }
}
