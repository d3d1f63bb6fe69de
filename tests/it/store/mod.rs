//! Stores: conversion, hostile files, pipes in the place of files, failing disks, deliberate changes.

mod beyond_file;
mod bits;
mod convert;
mod drive_faults;
mod drives;
mod edits;
mod faults;
mod format_mix;
mod formats;
mod full_disk;
mod hostile;
mod identity;
mod imatrix;
mod number_formats;
mod nvfp4;
mod packed_integers;
mod pipes;
mod quantised;
mod strangers;
