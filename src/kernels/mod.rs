//! One file per kernel: parameters, recording, reference. This page is the table of contents.
