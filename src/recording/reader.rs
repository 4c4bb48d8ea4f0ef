//! Reads a recording back. A last line without an end was being written when the run was cut off: it is left out.

use super::{Header, Line, MAX_BLOCKS, TimedOp, VERSION, check_settings};
use crate::telemetry::StepRecord;
use std::io::{BufRead, Read};

/// A longer line is not one of ours.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// A recording in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    pub header: Header,
    pub ops: Vec<TimedOp>,
    pub records: Vec<StepRecord>,
    /// The last line was cut off and is left out.
    pub is_truncated: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("the recording cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("the file is empty")]
    Empty,
    #[error("line {line} of the recording {fault}")]
    Line { line: usize, fault: String },
}

impl Recording {
    pub fn read(mut input: impl BufRead) -> Result<Recording, ReadError> {
        let mut recording: Option<Recording> = None;
        let mut bytes = Vec::new();
        for line in 1.. {
            bytes.clear();
            let fault = |fault: String| ReadError::Line { line, fault };
            (&mut input).take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes)?;
            if bytes.is_empty() {
                break;
            }
            let is_whole = bytes.ends_with(b"\n");
            if bytes.len() as u64 == MAX_LINE_BYTES && !is_whole {
                return Err(fault(format!("is longer than {MAX_LINE_BYTES} bytes")));
            }
            let parsed = match serde_json::from_slice::<Line>(&bytes) {
                Ok(parsed) => parsed,
                Err(_) if !is_whole && recording.is_some() => {
                    recording.as_mut().expect("asked above").is_truncated = true;
                    break;
                }
                Err(error) => return Err(fault(describe(&bytes, &error))),
            };
            match (parsed, &mut recording) {
                (Line::Header(header), None) => {
                    if header.version != VERSION {
                        return Err(fault(format!("names version {}, this is version {VERSION}", header.version)));
                    }
                    check_settings(&header.kv, &header.scheduler).map_err(fault)?;
                    if header.num_host_blocks > MAX_BLOCKS {
                        let n = header.num_host_blocks;
                        return Err(fault(format!("num_host_blocks is {n}, must be at most {MAX_BLOCKS}")));
                    }
                    let (ops, records) = (Vec::new(), Vec::new());
                    recording = Some(Recording { header: *header, ops, records, is_truncated: false });
                }
                (_, None) => return Err(fault("is not the header of a recording".into())),
                (Line::Header(_), Some(_)) => return Err(fault("is a second header".into())),
                (Line::Op(op), Some(recording)) => recording.ops.push(*op),
                (Line::Record(record), Some(recording)) => recording.records.push(*record),
            }
        }
        recording.ok_or(ReadError::Empty)
    }
}

/// Another version may have another header: its number says more than the first field that is missing.
fn describe(bytes: &[u8], error: &serde_json::Error) -> String {
    let value: Option<serde_json::Value> = serde_json::from_slice(bytes).ok();
    let version = value.and_then(|value| value.pointer("/header/version").and_then(|v| v.as_u64()));
    match version {
        Some(version) if version != u64::from(VERSION) => format!("names version {version}, this is version {VERSION}"),
        _ => format!("is not valid: {error}"),
    }
}
