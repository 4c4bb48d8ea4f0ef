//! A step described: dispatches and copies over bound buffers, as plain data that can be printed, counted and split.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::buffer::BufferSlice;
use super::pipeline::Bound;
use super::streamed::Streamed;

/// Width of a row of workgroups when one dimension is not enough; equals `GRID_ROW` in shared/grid.wgsl.
pub const GRID_ROW: u32 = 32768;

/// One thing for the GPU to do.
#[derive(Clone, Debug)]
pub enum Command {
    /// Runs `workgroups` workgroups, counted in one line by `linear_workgroup` of shared/grid.wgsl.
    Dispatch { label: Cow<'static, str>, bound: Arc<Bound>, workgroups: u32 },
    /// Copies as many bytes as `from` has to the start of `to`; one of them may be a line of texels. Ends the compute pass.
    Copy { from: BufferSlice, to: BufferSlice },
    /// Zeroes a slice. Ends the compute pass.
    Clear { slice: BufferSlice },
    /// Brings content from host memory. Ends the submit.
    Load { content: Arc<Streamed> },
}

/// Commands in order. Each sees what those before it wrote.
#[derive(Clone, Debug)]
pub struct Recording {
    pub label: Cow<'static, str>,
    pub commands: Vec<Command>,
}

impl Recording {
    pub fn new(label: impl Into<Cow<'static, str>>) -> Recording {
        Recording { label: label.into(), commands: Vec::new() }
    }

    /// Empties it, keeping its capacity.
    pub fn clear(&mut self) {
        self.commands.clear();
    }

    /// Adds a dispatch; none when there is nothing to do.
    pub fn dispatch(&mut self, label: impl Into<Cow<'static, str>>, bound: &Arc<Bound>, workgroups: u32) {
        if workgroups > 0 {
            self.commands.push(Command::Dispatch { label: label.into(), bound: bound.clone(), workgroups });
        }
    }

    pub fn copy(&mut self, from: BufferSlice, to: BufferSlice) {
        assert!(from.size <= to.size, "copy of {from:?} into {to:?}");
        assert!(!(from.buffer.is_texels() && to.buffer.is_texels()), "copy of {from:?} into {to:?}, both texels");
        self.commands.push(Command::Copy { from, to });
    }

    pub fn clear_slice(&mut self, slice: BufferSlice) {
        self.commands.push(Command::Clear { slice });
    }

    /// What follows reads this content.
    pub fn load(&mut self, content: &Arc<Streamed>) {
        self.commands.push(Command::Load { content: content.clone() });
    }

    /// Without what comes from host memory: for dispatches that read none of it.
    pub fn skip_loads(&mut self) {
        self.commands.retain(|command| !matches!(command, Command::Load { .. }));
    }

    /// Whether the other one is of the same dispatches. One with anything else is never the same.
    pub fn is_same(&self, other: &Recording) -> bool {
        let is_same = |pair: (&Command, &Command)| match pair {
            (Command::Dispatch { bound: a, workgroups: n, .. }, Command::Dispatch { bound: b, workgroups: m, .. }) => {
                n == m && Arc::ptr_eq(a, b)
            }
            _ => false,
        };
        self.commands.len() == other.commands.len() && self.commands.iter().zip(&other.commands).all(is_same)
    }

    /// The work of each command, in threads.
    pub fn weights(&self) -> Vec<u64> {
        let weight = |command: &Command| match command {
            Command::Dispatch { bound, workgroups, .. } => {
                let threads = bound.kernel.reflection.workgroup_size.iter().map(|n| u64::from(*n)).product::<u64>();
                threads * u64::from(*workgroups)
            }
            Command::Copy { .. } | Command::Clear { .. } | Command::Load { .. } => 0,
        };
        self.commands.iter().map(weight).collect()
    }

    pub fn num_dispatches(&self) -> u32 {
        self.commands.iter().filter(|c| matches!(c, Command::Dispatch { .. })).count() as u32
    }
}

/// A number of workgroups as a grid within 65535 in each dimension.
pub fn grid(workgroups: u32) -> [u32; 3] {
    if workgroups <= GRID_ROW { [workgroups, 1, 1] } else { [GRID_ROW, workgroups.div_ceil(GRID_ROW), 1] }
}

impl fmt::Display for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} commands", self.label, self.commands.len())?;
        for command in &self.commands {
            match command {
                Command::Dispatch { label, bound, workgroups } => writeln!(f, "  {label}: {workgroups} x {bound:?}")?,
                Command::Copy { from, to } => writeln!(f, "  copy {from:?} -> {to:?}")?,
                Command::Clear { slice } => writeln!(f, "  clear {slice:?}")?,
                Command::Load { content } => writeln!(f, "  load {} bytes", content.num_bytes())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_all_workgroups_within_the_limit_of_a_dimension() {
        for n in [1, 2, GRID_ROW, GRID_ROW + 1, 65535, 65536, 1_000_000] {
            let [x, y, z] = grid(n);
            assert!(x <= 65535 && y <= 65535 && z == 1, "{n}");
            assert!(x * y >= n && x * (y - 1) < n, "{n}");
            assert!(y == 1 || x == GRID_ROW, "{n}: the shader multiplies rows by GRID_ROW");
        }
        assert!(include_str!("../../shaders/shared/grid.wgsl").contains(&format!("GRID_ROW: u32 = {GRID_ROW}u")));
    }
}
