//! Matrices on the GPU: packed planes, cut by rows where a binding cannot hold them.
//!
//! Host memory stays bounded: rows are packed and uploaded a few MiB at a time, straight from the (mapped) file. Planes are
//! buffers, or texels where the adapter prefers those.

use crate::gpu::texels::MAX_EXTENT;
use crate::gpu::{Buffer, BufferSlice, BufferUse, Gpu, GpuError, Uploader};
use crate::model::dtype::DType;

use super::pack::{BLOCK_ROWS, Format, PackError, PlaneBytes, Planes};

/// Planes are packed in pieces of about this size.
const PIECE_BYTES: u64 = 4 << 20;
/// Offset of a plane within its buffer: a multiple of every adapter's alignment.
const PLANE_ALIGN: u64 = 256;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    #[error("{label}: {source}")]
    Pack { label: String, source: PackError },
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Not even 64 rows fit into a binding.
    #[error("{label}: rows of {k} elements are too long for this adapter's bindings of {max_plane_bytes} bytes")]
    RowTooLong { label: String, k: u32, max_plane_bytes: u64 },
}

/// A matrix `[n, k]` on the GPU.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    pub label: String,
    pub format: Format,
    pub n: u32,
    pub k: u32,
    /// Column j belongs to input `order[j]` (u32 `[k]`); `None` where they are in order.
    pub order: Option<BufferSlice>,
    /// Ascending rows; all but the last have the same number, a multiple of 64.
    pub slices: Vec<PackedSlice>,
}

/// Some rows of a matrix.
#[derive(Clone, Debug)]
pub struct PackedSlice {
    pub first_row: u32,
    pub num_rows: u32,
    pub q: BufferSlice,
    pub h: Option<BufferSlice>,
    pub s: Option<BufferSlice>,
}

impl PackedMatrix {
    /// Packs and uploads the rows of `parts`, one after the other: Q, K and V of one type make one matrix. Each part is
    /// as the file stores it.
    pub fn upload(
        gpu: &Gpu,
        uploader: &mut Uploader<'_>,
        label: &str,
        dtype: DType,
        k: u32,
        parts: &[&[u8]],
    ) -> Result<PackedMatrix, WeightError> {
        let max_plane_bytes = gpu.caps().max_binding_bytes;
        PackedMatrix::upload_sliced(gpu, uploader, label, dtype, k, parts, max_plane_bytes)
    }

    /// As [`PackedMatrix::upload`], with slices whose planes have at most so many bytes.
    pub fn upload_sliced(
        gpu: &Gpu,
        uploader: &mut Uploader<'_>,
        label: &str,
        dtype: DType,
        k: u32,
        parts: &[&[u8]],
        max_plane_bytes: u64,
    ) -> Result<PackedMatrix, WeightError> {
        let pack_error = |source| WeightError::Pack { label: label.into(), source };
        let format = PackedMatrix::format(gpu, dtype, k);
        let row_bytes = format.row_bytes(k).map_err(pack_error)?;
        if let Some(part) = parts.iter().find(|p| row_bytes == 0 || !p.len().is_multiple_of(row_bytes)) {
            return Err(pack_error(PackError::PartialRow { dtype, k, bytes: part.len() }));
        }
        let rows: Vec<&[u8]> = parts.iter().flat_map(|p| p.chunks_exact(row_bytes)).collect();
        let rows_per_slice = slice_rows(format, k, max_plane_bytes, gpu.caps().max_buffer_bytes)
            .ok_or_else(|| WeightError::RowTooLong { label: label.into(), k, max_plane_bytes })?;
        let mut slices = Vec::new();
        for (i, rows) in rows.chunks(rows_per_slice as usize).enumerate() {
            let first_row = i as u32 * rows_per_slice;
            let upload = if format.is_texels() { upload_texels } else { upload_slice };
            slices.push(upload(gpu, uploader, label, format, k, first_row, rows)?);
        }
        Ok(PackedMatrix { label: label.into(), format, n: rows.len() as u32, k, order: None, slices })
    }

    /// How matrices of a type with rows of `k` elements lie on this device.
    pub fn format(gpu: &Gpu, dtype: DType, k: u32) -> Format {
        let format = Format::of(dtype);
        texel_format(gpu, format, k).unwrap_or(format)
    }

    /// Bytes on the GPU.
    pub fn bytes(&self) -> u64 {
        // Planes share a buffer, or have texels of their own.
        let others = |s: &PackedSlice| s.h.iter().chain(&s.s).map(|p| p.buffer.size()).sum::<u64>();
        let more = |s: &PackedSlice| if self.format.is_texels() { others(s) } else { 0 };
        self.slices.iter().map(|s| s.q.buffer.size() + more(s)).sum()
    }
}

/// The matrices `[n, k]` of all experts of a layer on the GPU, one after the other, each padded to whole blocks of rows.
#[derive(Clone, Debug)]
pub struct ExpertMatrix {
    pub label: String,
    pub format: Format,
    pub num_experts: u32,
    pub n: u32,
    pub k: u32,
    /// Ascending padded rows, counted over experts; a slice holds whole blocks.
    pub slices: Vec<PackedSlice>,
}

/// What [`ExpertMatrix::upload`] makes.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShape<'a> {
    pub label: &'a str,
    pub dtype: DType,
    pub num_experts: u32,
    pub n: u32,
    pub k: u32,
    /// Planes of a slice have at most so many bytes.
    pub max_plane_bytes: u64,
}

impl ExpertMatrix {
    /// Packs and uploads expert after expert. `rows_of` gives an expert's rows, as the file stores them.
    pub fn upload<'m, E: From<WeightError>>(
        gpu: &Gpu,
        uploader: &mut Uploader<'_>,
        shape: ExpertShape<'_>,
        mut rows_of: impl FnMut(u32) -> Result<Vec<std::borrow::Cow<'m, [u8]>>, E>,
    ) -> Result<ExpertMatrix, E> {
        let ExpertShape { label, dtype, num_experts, n, k, max_plane_bytes } = shape;
        let pack_error = |source| WeightError::Pack { label: label.into(), source };
        let format = Format::of(dtype);
        let row_bytes = format.row_bytes(k).map_err(pack_error)?;
        let plane_bytes = format.block_bytes(k);
        let rows_per_slice = slice_rows(format, k, max_plane_bytes, gpu.caps().max_buffer_bytes)
            .ok_or_else(|| WeightError::RowTooLong { label: label.into(), k, max_plane_bytes })?;
        let blocks_per_expert = n.div_ceil(BLOCK_ROWS);
        let num_blocks = num_experts * blocks_per_expert;
        let blocks_per_slice = rows_per_slice / BLOCK_ROWS;
        let mut slices = Vec::new();
        let mut starts = [(0, 0); 3];
        let mut planes = Planes::default();
        for expert in 0..num_experts {
            let parts = rows_of(expert)?;
            let rows: Vec<&[u8]> = parts.iter().flat_map(|p| p.chunks_exact(row_bytes)).collect();
            if rows.len() != n as usize || parts.iter().any(|p| !p.len().is_multiple_of(row_bytes)) {
                let bytes = parts.iter().map(|p| p.len()).sum();
                return Err(pack_error(PackError::PartialRow { dtype, k, bytes }).into());
            }
            for (b, rows) in rows.chunks(BLOCK_ROWS as usize).enumerate() {
                let block = expert * blocks_per_expert + b as u32;
                if block.is_multiple_of(blocks_per_slice) {
                    let first_row = block * BLOCK_ROWS;
                    let num_rows = blocks_per_slice.min(num_blocks - block) * BLOCK_ROWS;
                    let (slice, at) = alloc_slice(gpu, label, plane_bytes, first_row, num_rows).map_err(E::from)?;
                    slices.push(slice);
                    starts = at;
                }
                planes.clear();
                format.pack_block(k, rows, &mut planes);
                let slice = slices.last().expect("the first block begins one");
                let done = u64::from(block % blocks_per_slice);
                write_piece(uploader, &slice.q.buffer, starts, done, &planes).map_err(WeightError::from)?;
            }
        }
        Ok(ExpertMatrix { label: label.into(), format, num_experts, n, k, slices })
    }

    /// Bytes on the GPU.
    pub fn bytes(&self) -> u64 {
        self.slices.iter().map(|s| s.q.buffer.size()).sum()
    }

    /// Rows of an expert with its padding.
    pub fn expert_rows(&self) -> u32 {
        self.n.next_multiple_of(BLOCK_ROWS)
    }
}

/// Uploads a vector (gain, bias, table) as f32, with zeros up to `len` elements.
pub fn upload_vector(
    gpu: &Gpu,
    uploader: &mut Uploader<'_>,
    label: &str,
    values: &[f32],
    len: u32,
) -> Result<Buffer, GpuError> {
    let mut padded = values.to_vec();
    padded.resize((len as usize).max(values.len()), 0.0);
    let buffer = gpu.alloc(label, 4 * padded.len() as u64, BufferUse::Storage)?;
    uploader.write(&buffer.whole(), bytemuck::cast_slice(&padded))?;
    Ok(buffer)
}

/// Rows of a slice whose planes fit a binding and, together, a buffer.
fn slice_rows(format: Format, k: u32, max_plane_bytes: u64, max_buffer_bytes: u64) -> Option<u32> {
    let block = format.block_bytes(k);
    let by_binding = max_plane_bytes / block.q.max(block.h).max(block.s).max(1);
    let by_buffer = max_buffer_bytes.saturating_sub(3 * PLANE_ALIGN) / (block.q + block.h + block.s).max(1);
    // Element indices within a plane must fit u32 with room to spare; no binding is larger than 2 GiB anyway.
    let blocks = by_binding.min(by_buffer).min(u64::from(u32::MAX / BLOCK_ROWS));
    let blocks = if format.is_texels() { blocks.min(max_texel_blocks(format, k)) } else { blocks };
    (blocks > 0).then(|| blocks as u32 * BLOCK_ROWS)
}

fn upload_slice(
    gpu: &Gpu,
    uploader: &mut Uploader<'_>,
    label: &str,
    format: Format,
    k: u32,
    first_row: u32,
    rows: &[&[u8]],
) -> Result<PackedSlice, WeightError> {
    let block = format.block_bytes(k);
    let (slice, starts) = alloc_slice(gpu, label, block, first_row, rows.len() as u32)?;
    let blocks_per_piece = (PIECE_BYTES / (block.q + block.h + block.s).max(1)).max(1) as usize;
    let mut planes = Planes::default();
    let mut done = 0;
    for piece in rows.chunks(blocks_per_piece * BLOCK_ROWS as usize) {
        for rows in piece.chunks(BLOCK_ROWS as usize) {
            format.pack_block(k, rows, &mut planes);
        }
        write_piece(uploader, &slice.q.buffer, starts, done, &planes)?;
        done += piece.len().div_ceil(BLOCK_ROWS as usize) as u64;
        planes.clear();
    }
    Ok(slice)
}

/// A buffer for so many rows; with each plane's start and bytes of a block.
fn alloc_slice(
    gpu: &Gpu,
    label: &str,
    block: PlaneBytes,
    first_row: u32,
    num_rows: u32,
) -> Result<(PackedSlice, [(u64, u64); 3]), WeightError> {
    let num_blocks = u64::from(num_rows.div_ceil(BLOCK_ROWS));
    let (q, h, s) = (num_blocks * block.q, num_blocks * block.h, num_blocks * block.s);
    let h_start = q.next_multiple_of(PLANE_ALIGN);
    let s_start = (h_start + h).next_multiple_of(PLANE_ALIGN);
    let buffer = gpu.alloc(label, s_start + s, BufferUse::Storage)?;
    let slice = PackedSlice {
        first_row,
        num_rows,
        q: buffer.slice(0, q),
        h: (h > 0).then(|| buffer.slice(h_start, h)),
        s: (s > 0).then(|| buffer.slice(s_start, s)),
    };
    Ok((slice, [(0, block.q), (h_start, block.h), (s_start, block.s)]))
}

/// Writes packed blocks behind `done` earlier ones; `plane_starts` has each plane's start and bytes of a block.
fn write_piece(
    uploader: &mut Uploader<'_>,
    buffer: &Buffer,
    plane_starts: [(u64, u64); 3],
    done: u64,
    planes: &Planes,
) -> Result<(), GpuError> {
    for ((start, block_bytes), bytes) in plane_starts.into_iter().zip([&planes.q, &planes.h, &planes.s]) {
        if !bytes.is_empty() {
            uploader.write(&buffer.slice(start + done * block_bytes, bytes.len() as u64), bytes)?;
        }
    }
    Ok(())
}

/// Blocks side by side in a plane of texels.
const MAX_ROW_BLOCKS: u64 = (MAX_EXTENT / BLOCK_ROWS) as u64;

/// Texels of a block's row in each plane: q, h, s.
fn texel_items(format: Format, k: u32) -> [u32; 3] {
    let (block, texel) = (format.block_bytes(k), format.texel_bytes());
    let items = |bytes: u64, texel: u64| bytes.checked_div(texel * u64::from(BLOCK_ROWS)).unwrap_or(0) as u32;
    [items(block.q, texel.q), items(block.h, texel.h), items(block.s, texel.s)]
}

/// The format as texels, where the adapter prefers those and a block fits.
fn texel_format(gpu: &Gpu, format: Format, k: u32) -> Option<Format> {
    let format = format.as_texels().filter(|_| gpu.caps().prefers_texels)?;
    texel_items(format, k).iter().all(|&items| items <= MAX_EXTENT).then_some(format)
}

fn max_texel_blocks(format: Format, k: u32) -> u64 {
    let most = texel_items(format, k).into_iter().max().unwrap_or(1).max(1);
    MAX_ROW_BLOCKS * u64::from(MAX_EXTENT / most)
}

/// As [`upload_slice`], with each plane as texels; [`Format::as_texels`] says which texel is what.
fn upload_texels(
    gpu: &Gpu,
    uploader: &mut Uploader<'_>,
    label: &str,
    format: Format,
    k: u32,
    first_row: u32,
    rows: &[&[u8]],
) -> Result<PackedSlice, WeightError> {
    let (block, texel, items) = (format.block_bytes(k), format.texel_bytes(), texel_items(format, k));
    let num_blocks = (rows.len() as u64).div_ceil(u64::from(BLOCK_ROWS));
    let bands = num_blocks.div_ceil(MAX_ROW_BLOCKS).max(1);
    let row_blocks = num_blocks.div_ceil(bands).max(1) as usize;
    let alloc = |items: u32, texel_bytes: u64| {
        let extent = (row_blocks as u32 * BLOCK_ROWS, bands as u32 * items);
        (items > 0).then(|| gpu.alloc_texels(label, extent, texel_bytes as u32)).transpose()
    };
    let planes = [alloc(items[0], texel.q)?, alloc(items[1], texel.h)?, alloc(items[2], texel.s)?];
    let block_bytes = block.q + block.h + block.s;
    let blocks_per_piece = ((PIECE_BYTES / block_bytes.max(1)).max(1) as usize).min(row_blocks);
    let (mut packed, mut rect) = (Planes::default(), Vec::new());
    for (band, rows) in rows.chunks(row_blocks * BLOCK_ROWS as usize).enumerate() {
        for (piece, rows) in rows.chunks(blocks_per_piece * BLOCK_ROWS as usize).enumerate() {
            rows.chunks(BLOCK_ROWS as usize).for_each(|rows| format.pack_block(k, rows, &mut packed));
            let x = (piece * blocks_per_piece) as u32 * BLOCK_ROWS;
            let width = rows.len().next_multiple_of(BLOCK_ROWS as usize) as u32;
            for ((plane, items), bytes) in planes.iter().zip(items).zip([&packed.q, &packed.h, &packed.s]) {
                let Some(plane) = plane else { continue };
                side_by_side(bytes, (width / BLOCK_ROWS) as usize, items as usize, &mut rect);
                uploader.write_texels(plane, (x, band as u32 * items), (width, items), &rect)?;
            }
            packed.clear();
        }
    }
    let [q, h, s] = planes.map(|plane| plane.map(|p| p.whole()));
    let q = q.ok_or_else(|| GpuError::Validation { what: label.into(), message: "rows without elements".into() })?;
    Ok(PackedSlice { first_row, num_rows: rows.len() as u32, q, h, s })
}

/// Blocks one after the other, each of `items` runs, as rows of all blocks' runs.
fn side_by_side(blocks: &[u8], num_blocks: usize, items: usize, out: &mut Vec<u8>) {
    let run = blocks.len() / (num_blocks * items);
    out.clear();
    for item in 0..items {
        for block in 0..num_blocks {
            out.extend_from_slice(&blocks[(block * items + item) * run..][..run]);
        }
    }
}
