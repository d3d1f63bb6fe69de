//! Stores: conversion, hostile files, failing disks, deliberate changes.

mod convert;
mod edits;
mod faults;
mod formats;
mod hostile;
mod identity;
