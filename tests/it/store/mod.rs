//! Stores: conversion, hostile files, failing disks.

mod convert;
mod faults;
mod formats;
mod hostile;
