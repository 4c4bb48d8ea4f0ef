//! Memory that kernels read as texels of a read-only storage texture instead of elements of a storage buffer.
//!
//! Software drivers load from a buffer lane by lane, each with a branch and a bounds check; a texel of 16 bytes is one
//! load and a share of a transpose there, four times as fast. Elsewhere nothing is gained.
//!
//! Guarantees: texels hold the bytes that were written, whatever their format is called. Not attempted: writing texels on
//! the GPU, copies to and from them.

use super::buffer::{Buffer, UPLOAD_IN_FLIGHT, Uploader};
use super::device::Gpu;
use super::error::GpuError;

/// Largest width and height that every adapter has.
pub const MAX_EXTENT: u32 = 8192;

/// Subgroups of software drivers have at most this many lanes.
pub const TEXEL_LANES: u32 = 16;

/// A texture that is bound as a whole.
pub(super) struct Texels {
    texture: wgpu::Texture,
    pub(super) view: wgpu::TextureView,
    texel_bytes: u32,
}

impl Texels {
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
            usage: wgpu::TextureUsages::STORAGE_BINDING | wgpu::TextureUsages::COPY_DST,
            view_formats: &[],
        };
        let size = u64::from(width) * u64::from(height) * u64::from(texel_bytes);
        let texture = self.scoped(label, size, || self.device.create_texture(&desc))?;
        let view = texture.create_view(&wgpu::TextureViewDescriptor::default());
        Ok(Buffer::of_texels(self, label, size, Texels { texture, view, texel_bytes }))
    }

    /// Writes a rectangle before the next submit.
    pub(super) fn write_texels(&self, to: &Buffer, (x, y): (u32, u32), (width, height): (u32, u32), bytes: &[u8]) {
        let texels = to.texels().expect("memory that was allocated as texels");
        let bytes_per_row = Some(width * texels.texel_bytes);
        let target =
            wgpu::TexelCopyTextureInfo { origin: wgpu::Origin3d { x, y, z: 0 }, ..texels.texture.as_image_copy() };
        let layout = wgpu::TexelCopyBufferLayout { offset: 0, bytes_per_row, rows_per_image: Some(height) };
        let extent = wgpu::Extent3d { width, height, depth_or_array_layers: 1 };
        self.queue.write_texture(target, bytes, layout, extent);
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
        if self.capture.as_mut().is_some_and(|capture| capture.keep_texels(to, (x, y), (width, height), bytes)) {
            return Ok(());
        }
        if self.pending > 0 && self.pending + bytes.len() > UPLOAD_IN_FLIGHT {
            self.flush()?;
        }
        self.gpu.write_texels(to, (x, y), (width, height), bytes);
        self.pending += bytes.len();
        Ok(())
    }
}
