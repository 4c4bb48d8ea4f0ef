//! Content of blocks between the pool and host memory.
//!
//! Guarantees: what goes out is read before anything of the step writes, what comes in is written before anything of it
//! computes; host memory changes only after the step that filled it was waited for. Neighbouring blocks travel in one
//! copy per buffer. Transfers of more than [`STAGE_BYTES`] go in rounds of their own before the step.

use super::super::ExecError;
use super::super::host_store::HostStore;
use super::kv_buffers::{KvBuffers, Plane};
use crate::batch::HostTransfer;
use crate::gpu::{Buffer, BufferSlice, BufferUse, Gpu, GpuError, Recording, Replayer};
use crate::ids::HostSlot;
use std::time::{Duration, Instant};

/// Staging of one direction.
const STAGE_BYTES: u64 = 64 << 20;

/// The pool's buffers as pages, the host memory, and the staging between them.
pub struct Swapper {
    /// The planes of the pool.
    parts: Vec<Part>,
    bytes_per_block: u64,
    store: HostStore,
    stage_out: Option<Buffer>,
    stage_in: Option<Buffer>,
    /// Time spent on copies since it was asked for last.
    busy: Duration,
}

struct Part {
    buffer: Buffer,
    bytes_per_block: u64,
}

/// Transfers in the order in which staging holds them.
#[derive(Debug, Default)]
pub struct Outgoing {
    transfers: Vec<HostTransfer>,
}

impl Swapper {
    pub fn new(kv: &KvBuffers, num_host_blocks: u32) -> Self {
        let part = |plane: Plane<'_>| Part { buffer: plane.buffer.clone(), bytes_per_block: plane.block_bytes };
        let parts: Vec<Part> = kv.planes().map(part).collect();
        let bytes_per_block = kv.block_bytes();
        let store = HostStore::new(num_host_blocks, bytes_per_block);
        Swapper { parts, bytes_per_block, store, stage_out: None, stage_in: None, busy: Duration::ZERO }
    }

    pub fn store(&self) -> &HostStore {
        &self.store
    }

    pub fn put(&mut self, slot: HostSlot, bytes: &[u8]) -> Result<(), ExecError> {
        self.store.put(slot, bytes)
    }

    /// Microseconds that this side of the copies has taken since the last call.
    pub fn take_busy_us(&mut self) -> u32 {
        std::mem::take(&mut self.busy).as_micros() as u32
    }

    /// Blocks of one round.
    pub fn blocks_per_round(&self) -> usize {
        (STAGE_BYTES / self.bytes_per_block.max(1)).max(1) as usize
    }

    /// Records the copies of at most a round to staging. The slice is to be read back and given to [`Self::keep`].
    pub fn record_out(
        &mut self,
        gpu: &Gpu,
        recording: &mut Recording,
        transfers: &[HostTransfer],
    ) -> Result<(Outgoing, BufferSlice), GpuError> {
        let outgoing = Outgoing { transfers: by_block(transfers) };
        let bytes = self.bytes_per_block * transfers.len() as u64;
        let stage = grown(gpu, &mut self.stage_out, "swap out", bytes)?;
        self.each_run(&outgoing.transfers, |page, staged| recording.copy(page, stage.slice(staged.0, staged.1)));
        Ok((outgoing, stage.slice(0, bytes)))
    }

    /// Stages at most a round of host content and records the copies to its blocks.
    pub fn record_in(
        &mut self,
        gpu: &Gpu,
        recording: &mut Recording,
        transfers: &[HostTransfer],
    ) -> Result<(), GpuError> {
        let started = Instant::now();
        let transfers = by_block(transfers);
        let count = transfers.len();
        let mut bytes = vec![0; self.bytes_per_block as usize * count];
        for (k, transfer) in transfers.iter().enumerate() {
            let mut from: &[u8] = self.store.get_mut(transfer.host);
            let mut region = 0;
            for part in &self.parts {
                let size = part.bytes_per_block as usize;
                bytes[region + k * size..][..size].copy_from_slice(&from[..size]);
                from = &from[size..];
                region += size * count;
            }
        }
        let stage = grown(gpu, &mut self.stage_in, "swap in", bytes.len() as u64)?;
        // Only staging is written ahead of the submit: the pages are written in order, by copies within it.
        gpu.write(&stage.slice(0, bytes.len() as u64), &bytes);
        self.each_run(&transfers, |page, staged| recording.copy(stage.slice(staged.0, staged.1), page));
        self.busy += started.elapsed();
        Ok(())
    }

    /// Stores what a finished submit read back.
    pub fn keep(&mut self, outgoing: &Outgoing, bytes: &[u8]) {
        let started = Instant::now();
        let count = outgoing.transfers.len();
        for (k, transfer) in outgoing.transfers.iter().enumerate() {
            let to = self.store.get_mut(transfer.host);
            let (mut region, mut at) = (0, 0);
            for part in &self.parts {
                let size = part.bytes_per_block as usize;
                to[at..at + size].copy_from_slice(&bytes[region + k * size..][..size]);
                at += size;
                region += size * count;
            }
        }
        self.busy += started.elapsed();
    }

    /// Staging holds, buffer after buffer, the pages of all transfers in their order; neighbouring blocks make one run.
    fn each_run(&self, transfers: &[HostTransfer], mut copy: impl FnMut(BufferSlice, (u64, u64))) {
        let mut region = 0;
        for part in &self.parts {
            let size = part.bytes_per_block;
            let mut first = 0;
            for run in transfers.chunk_by(|a, b| a.block.0 + 1 == b.block.0) {
                let len = run.len() as u64;
                let page = part.buffer.slice(u64::from(run[0].block.0) * size, len * size);
                copy(page, (region + first * size, len * size));
                first += len;
            }
            region += size * transfers.len() as u64;
        }
    }
}

/// Sends all of `swap_out`, then all of `swap_in`, in submits of their own. The first error of the second half leaves
/// pages half written: it is told by `Err((error, true))`.
pub fn in_rounds(
    swapper: &mut Swapper,
    (gpu, replayer): (&Gpu, &mut Replayer),
    swap_out: &[HostTransfer],
    swap_in: &[HostTransfer],
) -> Result<Vec<(Outgoing, Vec<u8>)>, (GpuError, bool)> {
    let size = swapper.blocks_per_round();
    let mut kept = Vec::new();
    for round in swap_out.chunks(size) {
        let mut send = || {
            let mut recording = Recording::new("swap out");
            let (outgoing, slice) = swapper.record_out(gpu, &mut recording, round)?;
            let in_flight = replayer.submit(gpu, &recording, &[slice])?;
            let bytes = replayer.wait(gpu, in_flight)?.readback.pop().unwrap_or_default();
            Ok((outgoing, bytes))
        };
        kept.push(send().map_err(|error| (error, false))?);
    }
    for round in swap_in.chunks(size) {
        let mut send = || {
            let mut recording = Recording::new("swap in");
            swapper.record_in(gpu, &mut recording, round)?;
            let in_flight = replayer.submit(gpu, &recording, &[])?;
            replayer.wait(gpu, in_flight).map(drop)
        };
        send().map_err(|error| (error, true))?;
    }
    Ok(kept)
}

fn by_block(transfers: &[HostTransfer]) -> Vec<HostTransfer> {
    let mut sorted = transfers.to_vec();
    sorted.sort_unstable_by_key(|transfer| transfer.block);
    sorted
}

/// The staging buffer, of at least so many bytes.
fn grown(gpu: &Gpu, stage: &mut Option<Buffer>, label: &str, bytes: u64) -> Result<Buffer, GpuError> {
    if let Some(stage) = stage.as_ref().filter(|stage| stage.size() >= bytes) {
        return Ok(stage.clone());
    }
    let buffer = gpu.alloc(label, bytes.next_power_of_two(), BufferUse::Storage)?;
    *stage = Some(buffer.clone());
    Ok(buffer)
}
