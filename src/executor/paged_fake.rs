//! A paged memory of hashes that catches every scheduling fault.
